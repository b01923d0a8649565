"""Which programs an `external` job may start: those the operator named, and no other."""

from collections.abc import Iterable

from eagle3_core.contract.params import ExternalParams, StageParams
from server.errors import FieldError, Forbidden
from server.services.paths import resolve
from server.settings import Settings

SETTING = "EYAS_EXTERNAL_PROGRAMS"


def foreign_program(settings: Settings, params: StageParams) -> str | None:
    """Why the program of a job may not be started, or None. A link may be turned after a job was submitted."""
    if not isinstance(params, ExternalParams) or resolve(params.argv[0]) in settings.external_programs:
        return None
    return f"{params.argv[0]} is not a program this daemon may start; its operator names them in {SETTING}"


def refuse_foreign_programs(settings: Settings, named: Iterable[tuple[str, StageParams]]) -> None:
    """Compare programs with those allowed, links followed on both sides.

    Args:
        settings: hold the allowed ones.
        named: (JSON pointer, parameters) of each job.

    Raises:
        Forbidden: a program is not among them.
    """
    found = [(f"{pointer}/argv/0", foreign_program(settings, params)) for pointer, params in named]
    errors = [FieldError(place, fault) for place, fault in found if fault is not None]
    if errors:
        raise Forbidden(f"{errors[0].pointer}: {errors[0].message}", errors)
