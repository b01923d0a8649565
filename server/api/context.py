"""What routes are given: the runtime and the gate of the app they belong to."""

from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Request

from server.domain.callers import Caller
from server.services.auth import Gate
from server.services.reconciler import Reconciler
from server.services.runtime import Runtime


@dataclass(frozen=True)
class AppContext:
    """Hangs on the app's state."""

    runtime: Runtime
    gate: Gate
    loop: Reconciler
    cookie_name: str


async def app_context(request: Request) -> AppContext:
    """The context of the running app."""
    return cast("AppContext", request.app.state.context)


async def calling(request: Request) -> Caller:
    """Who sent this request; the access check has seen to it that somebody did."""
    return cast("Caller", request.state.caller)


From = Annotated[Caller, Depends(calling)]
Context = Annotated[AppContext, Depends(app_context)]
