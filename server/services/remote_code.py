"""Code that a verifier's directory brings along: run only where request and settings both say so."""

from collections.abc import Iterable

from eagle3_core.contract.params import StageParams, VerifierParams
from server.errors import FieldError, Forbidden
from server.settings import Settings

SETTING = "EYAS_ALLOW_REMOTE_CODE"


def refuse_remote_code(settings: Settings, named: Iterable[tuple[str, StageParams]]) -> None:
    """Refuse requests to run a verifier's own code unless the operator allows it.

    Args:
        settings: say whether it is allowed.
        named: (JSON pointer, parameters) of each job.

    Raises:
        Forbidden: it is asked for and not allowed.
    """
    if settings.allow_remote_code:
        return
    errors = [
        FieldError(
            f"{pointer}/allow_remote_code",
            f"this daemon does not run code of a verifier's directory; its operator allows it with {SETTING}=1",
        )
        for pointer, params in named
        if isinstance(params, VerifierParams) and params.allow_remote_code
    ]
    if errors:
        raise Forbidden(f"{errors[0].pointer}: {errors[0].message}", errors)
