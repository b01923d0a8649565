"""Which programs an `external` job may start: those the operator named, and no other."""

from collections.abc import Iterable

from eagle3_core.contract.params import ExternalParams, StageParams
from server.errors import FieldError, Forbidden
from server.services.paths import resolve
from server.settings import Settings

SETTING = "EYAS_EXTERNAL_PROGRAMS"


def refuse_foreign_programs(settings: Settings, named: Iterable[tuple[str, StageParams]]) -> None:
    """Compare programs with those allowed, links followed on both sides.

    Args:
        settings: hold the allowed ones.
        named: (JSON pointer, parameters) of each job.

    Raises:
        Forbidden: a program is not among them.
    """
    errors = [
        FieldError(
            f"{pointer}/argv/0",
            f"{params.argv[0]} is not a program this daemon may start; its operator names them in {SETTING}",
        )
        for pointer, params in named
        if isinstance(params, ExternalParams) and resolve(params.argv[0]) not in settings.external_programs
    ]
    if errors:
        raise Forbidden(f"{errors[0].pointer}: {errors[0].message}", errors)
