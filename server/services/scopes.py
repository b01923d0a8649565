"""What of a request the caller's token does not allow."""

from collections.abc import Iterable

from eagle3_core.contract.params import ExternalParams
from server.domain.callers import Caller, Scope
from server.errors import FieldError, Forbidden
from server.settings import Settings


def refuse_stages(settings: Settings, caller: Caller, stages: Iterable[tuple[str, str]]) -> None:
    """Refuse `external` jobs of a caller whose scope does not reach.

    An allowed program may do whatever its arguments make it do, so that who may choose them may do anything.

    Args:
        settings: name the scope that is needed.
        caller: who asks.
        stages: JSON pointer to each job of the request, and its stage.

    Raises:
        Forbidden: names the scope that is needed.
    """
    needed = Scope(settings.external_scope)
    if caller.scope.covers(needed):
        return
    errors = [
        FieldError(
            f"{pointer}/stage", f"{stage} jobs need a token with the scope {needed}; {caller.name!r} has {caller.scope}"
        )
        for pointer, stage in stages
        if stage == ExternalParams.stage
    ]
    if errors:
        raise Forbidden(f"{errors[0].pointer}: {errors[0].message}", errors)
