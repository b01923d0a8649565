"""Server-sent events of a job: what it reports, and what it prints. A stream that breaks off is resumed by the last id.

id of an event     <incarnation>-<seq>        the incarnation is that of the database: another one begins anew
id of log text     <attempt>-<next offset>
id of the end      the same with .end         whoever comes back with it is told 204: there is nothing more
event: reset       the id was not ours: drop what came before, all of it follows
event: end         {"state": ...}             the job has ended and everything was sent
without an event   one JSON object, as in the lists

Nothing is queued for a client: each piece is read when the last one was taken (server/services/following.py), and one
that takes nothing for EYAS_UNREAD_S is cut off (server/system/connections.py).
"""

import json
import re
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event

from server.api.context import AppContext, Context
from server.api.jobs import KNOWN_PROBLEMS, MAX_OFFSET
from server.api.logs import TAIL_LIMIT, UNBUFFERED, AttemptParam, OffsetParam, TailParam, ViewParam, refuse_together
from server.api.routes import KnownQuery
from server.api.waiting import while_allowed
from server.domain.logtext import whole_characters
from server.services.following import follow_events, follow_logs, log_of
from server.services.logs import LogPart, View
from server.services.waiting import snapshot_of

router = APIRouter(prefix="/jobs", tags=["jobs"], responses=KNOWN_PROBLEMS, route_class=KnownQuery)

MEDIA_TYPE = "text/event-stream"
RETRY_MS = 1000
RESET = format_sse_event(event="reset", data_str="{}")

_ID = re.compile(r"([0-9a-f]{1,16})-([0-9]{1,18})(\.end)?")
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {MEDIA_TYPE: {}}, "description": "server-sent events"},
    204: {"description": "all was sent"},
}

LastId = Annotated[str | None, Header(description="the last id that was received: go on behind it")]
LastIdParam = Annotated[str | None, Query(description="the same, where no header can be sent")]


class Place:
    """Where a client is, by the last id it has. `ours` is false for an id of another series."""

    def __init__(self, last_id: str | None, series: str | None = None) -> None:
        found = None if last_id is None else _ID.fullmatch(last_id)
        self.known = bool(last_id)
        self.ours = found is not None and series in (None, found[1])
        self.series = found[1] if found is not None else ""
        self.number = int(found[2]) if found is not None and self.ours else 0
        self.at_end = found is not None and self.ours and found[3] is not None


@router.get("/{job_id}/events/stream", operation_id="streamEvents", response_class=Response, responses=_STREAM)
async def stream_events(
    context: Context,
    request: Request,
    job_id: str,
    after: Annotated[int | None, Query(ge=0, le=MAX_OFFSET, description="begin behind this sequence number")] = None,
    last_event_id: LastId = None,
    last_id: Annotated[LastIdParam, Query(alias="last_event_id")] = None,
) -> Response:
    """The events of a job from the first one, or behind the last id, to its end."""
    place = Place(last_event_id or last_id, context.runtime.incarnation)
    snapshot = await snapshot_of(context.runtime, job_id)
    if place.at_end and snapshot.ended:
        return Response(status_code=204)
    reset = place.known and (not place.ours or place.number > snapshot.last_seq)
    begin = 0 if reset else place.number or after or 0
    return _stream(context, request, _events(context, job_id, begin), reset)


async def _events(context: AppContext, job_id: str, after: int) -> AsyncIterator[bytes]:
    series = context.runtime.incarnation
    async for found in follow_events(context.runtime, job_id, after):
        yield b"".join(format_sse_event(data_str=text, id=f"{series}-{seq}") for seq, text in found)
        after = found[-1][0] if found else after
    yield await _end(context, job_id, f"{series}-{after}")


@router.get("/{job_id}/log/stream", operation_id="streamLog", response_class=Response, responses=_STREAM)
async def stream_log(
    context: Context,
    request: Request,
    job_id: str,
    offset: OffsetParam = None,
    tail: TailParam = None,
    attempt: AttemptParam = None,
    view: ViewParam = View.RAW,
    last_event_id: LastId = None,
    last_id: Annotated[LastIdParam, Query(alias="last_event_id")] = None,
) -> Response:
    """The log of a job as text, over all attempts that follow, to its end."""
    refuse_together({"offset": offset, "tail": tail})
    place = Place(last_event_id or last_id)
    snapshot = await snapshot_of(context.runtime, job_id)
    if place.at_end and snapshot.ended:
        return Response(status_code=204)
    number = attempt
    if place.known:
        number = int(place.series) if place.series.isdecimal() else 0
    log = await log_of(context.runtime, job_id, number if number and number <= snapshot.attempt else attempt)
    size, _ = await run_in_threadpool(log.extent)  # refused now, not when the answer has begun
    reset = place.known and (log.attempt != number or place.number > size)
    if place.known:
        offset = 0 if reset else place.number
    elif tail is not None:
        offset = await run_in_threadpool(log.begin_of_last, tail, TAIL_LIMIT)
    attempt = log.attempt or None
    return _stream(context, request, _log(context, job_id, attempt, offset or 0, view), reset)


async def _log(context: AppContext, job_id: str, attempt: int | None, offset: int, view: View) -> AsyncIterator[bytes]:
    held = b""
    last = f"{attempt or 0}-{offset}"
    async for part in follow_logs(context.runtime, job_id, attempt, offset, view):
        data = held + part.data
        # The rest of a character that is cut comes with the next piece; the id leaves it to be sent again.
        used = len(data) if part.complete or view == View.CLEAN else whole_characters(data)
        held = data[used:]
        if used:
            last = f"{part.attempt}-{part.next_offset - len(held)}"
        yield _piece(part, data[:used], last) if used else b""
    yield await _end(context, job_id, last)


def _piece(part: LogPart, data: bytes, last: str) -> bytes:
    text = {"attempt": part.attempt, "next_offset": int(last.partition("-")[2]), "text": data.decode(errors="replace")}
    return format_sse_event(data_str=json.dumps(text), id=last)


async def _end(context: AppContext, job_id: str, last: str) -> bytes:
    """The last word of a stream; none when it only breaks off because the daemon is being stopped."""
    snapshot = await snapshot_of(context.runtime, job_id)
    if context.runtime.waiters.closing or not snapshot.ended:
        return b""
    return format_sse_event(event="end", data_str=json.dumps({"state": snapshot.state}), id=f"{last}.end")


def _stream(context: AppContext, request: Request, pieces: AsyncIterator[bytes], reset: bool) -> Response:
    async def body() -> AsyncIterator[bytes]:
        yield format_sse_event(retry=RETRY_MS) + (RESET if reset else b"")
        async for piece in while_allowed(context, request, pieces):
            yield piece or KEEPALIVE_COMMENT

    return StreamingResponse(body(), media_type=MEDIA_TYPE, headers=UNBUFFERED)
