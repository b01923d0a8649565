"""What requests that wait have in common: durations, validators (ETag), preferences, and clients that go away.

until, since or If-None-Match, wait or Prefer  -->  Ask  --services.waiting.hold-->  200, 304, or 503 when stopping
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Coroutine
from typing import Annotated, Any, NamedTuple, TypeVar

from fastapi import FastAPI, Query, Request, Response

from eagle3_core.contract.durations import FORMS, parse_duration
from server.api.access import caller_of
from server.api.context import AppContext
from server.domain.marks import Until
from server.errors import FieldError, Invalid, ServiceError, Unauthorized
from server.services.waiting import FOREIGN, Outcome

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = TypeVar("P")

Wait = Annotated[
    str | None,
    Query(max_length=40, description=f"how long to wait for news: {FORMS}", examples=["90", "30m"]),
]
UntilParam = Annotated[Until, Query(description="what to wait for")]

_PREFERENCE = re.compile(r'(?:"(?:[^"\\]|\\.)*"|[^",])+')
_WAIT_PREFERENCE = re.compile(r"^\s*wait\s*=\s*\"?([0-9]{1,99})\"?\s*(?:;.*)?$", re.IGNORECASE)
_TAG = re.compile(r'\s*(?:W/)?"([^"]*)"\s*')


class Ask(NamedTuple):
    """How long to wait, as far as that is allowed, and whether `Prefer` said so."""

    seconds: float
    preferred: bool

    @property
    def headers(self) -> dict[str, str]:
        """What the answer says of it."""
        told = {"X-Wait-Limit": f"{self.seconds:g}"}
        return told | {"Preference-Applied": f"wait={self.seconds:.0f}"} if self.preferred else told


def ask_of(context: AppContext, request: Request, wait: str | None) -> Ask | None:
    """What the request asks for; None when it does not wait.

    Raises:
        Invalid: `wait` is no duration.
    """
    longest = context.runtime.settings.max_wait_s
    if wait is not None:
        try:
            return Ask(min(parse_duration(wait), longest), preferred=False)
        except ValueError as error:
            raise Invalid.of([FieldError("?wait", str(error))]) from None
    for header in request.headers.getlist("prefer"):
        for preference in _PREFERENCE.findall(header):
            if found := _WAIT_PREFERENCE.match(preference):
                return Ask(min(float(found[1]), longest), preferred=True)
    return None


def tags_of(request: Request) -> list[str]:
    """The entity tags of If-None-Match, without quotes; `*` stands for itself."""
    text = ",".join(request.headers.getlist("if-none-match"))
    return ["*"] if text.strip() == "*" else _TAG.findall(text)


def version_in(context: AppContext, known: str) -> int:
    """The version in a validator, or a version by itself; FOREIGN for what this database did not give out."""
    text = known.strip().removeprefix("W/").strip('"')
    incarnation, dash, version = text.rpartition("-")
    ours = not dash or incarnation == context.runtime.incarnation
    return int(version) if ours and version.isdecimal() and len(version) < 19 else FOREIGN


def version_known(context: AppContext, request: Request, since: str | None) -> int | None:
    """The newest version that `since`, or else If-None-Match, says the client has; None when neither does."""
    if since is not None:
        return version_in(context, since)
    versions = [version_in(context, tag) for tag in tags_of(request) if tag != "*"]
    return max(versions, default=None)


def conditional(request: Request, tag: str, body: bytes, headers: dict[str, str]) -> Response:
    """The body with its entity tag, or 304 when the client has it."""
    headers = {**headers, "ETag": f'"{tag}"'}
    if {tag, "*"} & set(tags_of(request)):
        return Response(status_code=304, headers=headers)
    return Response(body, media_type="application/json", headers=headers)


def waited(ask: Ask | None, outcome: Outcome | None) -> dict[str, str]:
    """The headers that tell how a wait ended."""
    return {} if ask is None or outcome is None else {"X-Wait": outcome.value, **ask.headers}


class ClientGone(Exception):
    """Nobody is left to be answered."""


async def unless_gone(context: AppContext, request: Request, waiting: Coroutine[Any, Any, T]) -> T:
    """The outcome of a wait that is given up when the client goes away.

    Raises:
        ClientGone: it did.
        Unauthorized: its token was revoked, or its session ended, meanwhile.
    """
    work, gone = asyncio.ensure_future(waiting), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientGone
        found = work.result()
    finally:
        for task in (work, gone):
            task.cancel()
    if not still_allowed(context, request):
        raise Unauthorized("the token was revoked, or the session has ended, meanwhile")
    return found


def install(app: FastAPI) -> None:
    """Have clients that went away cost no line in the log."""

    async def nobody_there(_request: Request, _error: Exception) -> Response:
        return Response(status_code=503)

    app.add_exception_handler(ClientGone, nobody_there)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def while_allowed(context: AppContext, request: Request, pieces: AsyncIterator[P]) -> AsyncIterator[P]:
    """The pieces of a stream, as long as the caller could ask for it again; looked at every heartbeat.

    It breaks off where it cannot go on (the job was deleted): whoever asks again is told why.
    """
    every = context.runtime.settings.heartbeat_s
    clock = asyncio.get_running_loop().time
    due = clock() + every
    try:
        async for piece in pieces:
            if clock() >= due:
                due = clock() + every
                if not still_allowed(context, request):
                    return
            yield piece
    except ServiceError as error:
        logger.warning("%s breaks off: %s", request.url.path, error.detail)


def still_allowed(context: AppContext, request: Request) -> bool:
    """Whether the caller could ask again now."""
    return caller_of(context.gate, context.cookie_name, request.headers) is not None
