"""What of a request the caller's token does not allow."""

from eagle3_core.contract.params import ExternalParams
from server.domain.callers import Caller, Scope
from server.errors import FieldError, Forbidden
from server.services.submission import ChainRequest, JobRequest
from server.settings import Settings


def refuse_stages(settings: Settings, caller: Caller, request: JobRequest | ChainRequest) -> None:
    """Refuse `external` jobs of a caller whose scope does not reach.

    An allowed program may do whatever its arguments make it do, so that who may choose them may do anything.

    Raises:
        Forbidden: names the scope that is needed.
    """
    needed = Scope(settings.external_scope)
    if caller.scope.covers(needed):
        return
    requests = [("", request)] if isinstance(request, JobRequest) else _placed(request)
    errors = [
        FieldError(
            f"{pointer}/stage",
            f"{one.stage} jobs need a token with the scope {needed}; {caller.name!r} has {caller.scope}",
        )
        for pointer, one in requests
        if one.stage == ExternalParams.stage
    ]
    if errors:
        raise Forbidden(f"{errors[0].pointer}: {errors[0].message}", errors)


def _placed(chain: ChainRequest) -> list[tuple[str, JobRequest]]:
    return [(f"/jobs/{place}", one) for place, one in enumerate(chain.jobs)]
