"""Logs and events: in pieces, as they grow, as streams that can be resumed.

GET /jobs/{id}/log             bytes: offset, tail, Range; wait for more; follow to the end
GET /jobs/{id}/log/stream      server-sent events, id <attempt>-<offset behind it>
GET /jobs/{id}/events/stream   server-sent events, id <incarnation of the database>-<seq>
"""

import re
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse

from server.api.context import AppContext, Context
from server.api.jobs import KNOWN_PROBLEMS, MAX_OFFSET, PROBLEM
from server.api.routes import KnownQuery
from server.api.waiting import Wait, ask_of, unless_gone, while_allowed
from server.errors import FieldError, Invalid, RangeNotSatisfiable
from server.services.following import follow_log, log_of, next_part
from server.services.logs import Log, LogPart, View

router = APIRouter(prefix="/jobs", tags=["jobs"], responses=KNOWN_PROBLEMS, route_class=KnownQuery)

DEFAULT_LIMIT = 65_536
TAIL_LIMIT = 1 << 20
MAX_LIMIT = 8 << 20
IN_ONE = 1 << 18
"""Bytes that are held at a time; more are read while they are sent."""

_RANGE = re.compile(r"bytes=\s*(?:([0-9]{1,99})-([0-9]{0,99})|-([0-9]{1,99}))\s*", re.IGNORECASE)

OffsetParam = Annotated[int | None, Query(ge=0, le=MAX_OFFSET, description="raw byte to begin at; default: 0")]
TailParam = Annotated[int | None, Query(ge=0, le=MAX_OFFSET, description="begin at the last so many lines instead")]
AttemptParam = Annotated[int | None, Query(ge=1, le=1_000_000, description="default: the newest one")]
ViewParam = Annotated[
    View, Query(description="clean: no colours, and of a progress bar drawn over itself the last drawing")
]


@router.head("/{job_id}/log", include_in_schema=False)
@router.get(
    "/{job_id}/log",
    operation_id="getLog",
    response_class=Response,
    responses={
        200: {"content": {"text/plain": {}}, "description": "raw bytes; X-Next-Offset is where to read on"},
        206: {"content": {"text/plain": {}}, "description": "the bytes of the Range"},
        416: PROBLEM,
    },
)
async def get_log(
    context: Context,
    request: Request,
    job_id: str,
    offset: OffsetParam = None,
    limit: Annotated[
        int | None, Query(ge=0, le=MAX_LIMIT, description="bytes at most; default: 65536, with `tail` 1048576")
    ] = None,
    tail: TailParam = None,
    attempt: AttemptParam = None,
    wait: Wait = None,
    follow: Annotated[bool, Query(description="go on sending what is written, to the end of the attempt")] = False,
    view: ViewParam = View.RAW,
) -> Response:
    """Bytes of the log; of the newest attempt unless one is named."""
    refuse_together(
        {"offset": offset, "tail": tail}, {"wait": wait, "follow": follow or None}, {"tail": tail, "wait": wait}
    )
    log = await log_of(context.runtime, job_id, attempt)
    most = limit if limit is not None else DEFAULT_LIMIT if tail is None else TAIL_LIMIT
    if follow and request.method != "HEAD":
        begin = await run_in_threadpool(log.begin_of_last, tail, most) if tail is not None else offset or 0
        await run_in_threadpool(log.extent)  # refused now, not when the answer has begun
        return _followed(context, request, log, begin, view)
    whole = all(one is None for one in (offset, limit, tail, wait)) and view == View.RAW
    if whole and (wanted := _range_of(request)):
        return await _ranged(log, wanted)
    told: dict[str, str] = {}
    if tail is not None and view == View.CLEAN:
        part = await run_in_threadpool(log.tail, tail, most, view)
    else:
        ask = None if request.method == "HEAD" else ask_of(context, request, wait)
        wait_s, told = (0.0, told) if ask is None else (ask.seconds, ask.headers)
        begin = offset or 0 if tail is None else await run_in_threadpool(log.begin_of_last, tail, most)
        reading = next_part(context.runtime, job_id, attempt, begin, min(most, IN_ONE), view, wait_s)
        part = await (unless_gone(context, request, reading) if wait_s else reading)
        if view == View.RAW and most > len(part.data) == IN_ONE:
            size, end = await run_in_threadpool(log.extent)
            return _in_pieces(log, part.offset, min(part.offset + most, end), size)
    return Response(part.data, media_type=_MEDIA_TYPE, headers=_headers(part) | told)


_MEDIA_TYPE = "text/plain; charset=utf-8"


def _headers(part: LogPart) -> dict[str, str]:
    return {
        "X-Log-Offset": str(part.offset),
        "X-Next-Offset": str(part.next_offset),
        "X-Log-Size": str(part.size),
        "X-Log-Attempt": str(part.attempt),
        "X-Log-Complete": str(part.complete).lower(),
        "Accept-Ranges": "bytes",
        "X-Content-Type-Options": "nosniff",
    }


def refuse_together(*pairs: dict[str, object]) -> None:
    """See that of each pair one was left out."""
    for pair in pairs:
        if all(value is not None for value in pair.values()):
            one, other = pair
            raise Invalid.of([FieldError(f"?{other}", f"{one} and {other} exclude each other; leave one out")])


def _followed(context: AppContext, request: Request, log: Log, begin: int, view: View) -> Response:
    async def pieces() -> AsyncIterator[bytes]:
        parts = follow_log(context.runtime, log.job_id, log.attempt or None, begin, view)
        async for part in while_allowed(context, request, parts):
            yield part.data

    headers = {"X-Log-Offset": str(begin), "X-Log-Attempt": str(log.attempt), **UNBUFFERED}
    return StreamingResponse(pieces(), media_type=_MEDIA_TYPE, headers=headers)


UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""What keeps caches and proxies from holding a stream back."""


def _range_of(request: Request) -> tuple[int | None, int | None] | None:
    """First and last byte of a Range; (None, n) for the last n. None for one that is absent or is to be ignored."""
    header = request.headers.get("range")
    # There is no validator of a log that If-Range could name; several ranges at once nobody needs here.
    if header is None or "if-range" in request.headers or (found := _RANGE.fullmatch(header)) is None:
        return None
    first, last, suffix = found.groups()
    if suffix is not None:
        return None, int(suffix)
    if last and int(last) < int(first):
        return None
    return int(first), int(last) if last else None


async def _ranged(log: Log, wanted: tuple[int | None, int | None]) -> Response:
    size, end = await run_in_threadpool(log.extent)
    first, last = wanted
    begin = max(0, end - (last or 0)) if first is None else first
    stop = end if first is None or last is None else min(last + 1, end)
    if begin >= end:
        raise RangeNotSatisfiable(f"the log of job {log.job_id} has {end} bytes as yet", end)
    answer = _in_pieces(log, begin, stop, size)
    answer.status_code = 206
    answer.headers["Content-Range"] = f"bytes {begin}-{stop - 1}/{end}"
    return answer


def _in_pieces(log: Log, begin: int, stop: int, size: int) -> Response:
    """Many bytes, of which no more are read at a time than can be sent."""

    async def pieces() -> AsyncIterator[bytes]:
        place = begin
        while place < stop:
            part = await run_in_threadpool(log.read, place, min(IN_ONE, stop - place))
            if not part.data:
                return  # cut off from outside: the answer breaks off, as its length tells
            place = part.next_offset
            yield part.data

    headers = _headers(LogPart(b"", begin, stop, size, log.attempt, complete=not log.live and stop >= size))
    headers["Content-Length"] = str(stop - begin)
    return StreamingResponse(pieces(), media_type=_MEDIA_TYPE, headers=headers)
