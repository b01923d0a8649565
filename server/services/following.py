"""What a job does from now on: its events and its log, read on whenever there is more.

Each follower has a place (a sequence number, an offset) and takes the next piece only once the last one was sent. So
one that reads slowly, or not at all, holds one piece and nobody else up; and one that was cut off goes on from its
place.
"""

import asyncio
from collections.abc import AsyncIterator

from fastapi.concurrency import run_in_threadpool

from server.db.queries import events as event_queries
from server.errors import NotFound
from server.services.logs import HELD_S, Log, LogPart, View
from server.services.runtime import Runtime
from server.services.waiters import rung
from server.services.waiting import snapshot_of

PIECE = 65_536
"""Bytes of a log, or characters of events, that are taken at a time."""

EVENTS_AT_ONCE = 500
PACE_S = 0.02
"""Between pieces that are not full, so that a chatty job costs fifty pieces a second and not thousands."""

BLIND_S = 0.2
"""Between looks at a log that is not there yet."""

UNWATCHED_S = 5.0
"""Between looks when the kernel tells of changes: on a network file system it does not."""

Events = list[tuple[int, str]]


async def follow_events(runtime: Runtime, job_id: str, after: int) -> AsyncIterator[Events]:
    """The events behind a sequence number, in pieces, to the end of the job; an empty piece every heartbeat.

    Raises:
        NotFound: there is no such job.
    """
    with runtime.waiters.bell([job_id]) as bell:
        while not runtime.waiters.closing:
            bell.clear()
            snapshot = await snapshot_of(runtime, job_id)
            found: Events = []
            if snapshot.last_seq > after:
                found = await run_in_threadpool(_events_after, runtime, job_id, after)
            if found:
                after = found[-1][0]
                yield found
                await asyncio.sleep(PACE_S if len(found) < EVENTS_AT_ONCE else 0)
            elif snapshot.ended:
                return
            else:
                await rung(bell, runtime.settings.heartbeat_s)
                if not bell.is_set():
                    yield []


def _events_after(runtime: Runtime, job_id: str, after: int) -> Events:
    with runtime.database.read() as session:
        found = event_queries.after(session, job_id, after, EVENTS_AT_ONCE, PIECE)
    return [(seq, runtime.redactor.text(text)) for seq, text in found]


async def log_of(runtime: Runtime, job_id: str, attempt: int | None = None) -> Log:
    """The log of an attempt as it is now, of the newest one unless one is named.

    Raises:
        NotFound: no such job, or no such attempt of it.
    """
    snapshot = await snapshot_of(runtime, job_id)
    if attempt is None or attempt == snapshot.attempt:
        live = snapshot.live if snapshot.attempt else not snapshot.ended
        return Log(runtime, job_id, snapshot.attempt, live)
    if attempt > snapshot.attempt:
        raise NotFound(f"job {job_id} has no attempt {attempt}")
    return Log(runtime, job_id, attempt, live=False)


async def next_part(
    runtime: Runtime, job_id: str, attempt: int | None, offset: int, limit: int, view: View, wait_s: float
) -> LogPart:
    """Bytes from an offset once there are any, once no more will come, or after `wait_s` seconds.

    Raises:
        NotFound: no such job, or no such attempt of it.
        Conflict: somebody put a link in its place.
    """
    end = asyncio.get_running_loop().time() + wait_s
    with runtime.waiters.bell([job_id]) as bell:
        try:
            while True:
                bell.clear()
                log = await log_of(runtime, job_id, attempt)
                part = await run_in_threadpool(log.read, offset, limit, view, bell if wait_s else None)
                left = end - asyncio.get_running_loop().time()
                over = part.complete or runtime.waiters.closing
                if part.data or part.next_offset > offset or over or left <= 0 or limit == 0:
                    return part
                await rung(bell, min(left, _patience(runtime, part)))
        finally:
            runtime.growth.forget(bell)


def _patience(runtime: Runtime, part: LogPart) -> float:
    if part.held:
        return HELD_S
    return BLIND_S if part.size == 0 or runtime.growth.blind else UNWATCHED_S


async def follow_log(
    runtime: Runtime, job_id: str, attempt: int | None, offset: int, view: View
) -> AsyncIterator[LogPart]:
    """The log of an attempt from an offset, in pieces, to its end; a piece without bytes every heartbeat.

    Without an attempt it is the newest one, once there is one.
    """
    while not runtime.waiters.closing:
        part = await next_part(runtime, job_id, attempt, offset, PIECE, view, runtime.settings.heartbeat_s)
        yield part
        if part.complete:
            return
        attempt, offset = part.attempt or None, part.next_offset
        if part.data and len(part.data) < PIECE:
            await asyncio.sleep(PACE_S)


async def follow_logs(
    runtime: Runtime, job_id: str, attempt: int | None, offset: int, view: View
) -> AsyncIterator[LogPart]:
    """As `follow_log`, and then the logs of the attempts that follow, to the end of the job."""
    while True:
        async for part in follow_log(runtime, job_id, attempt, offset, view):
            attempt = part.attempt or None
            yield part
        async for waited in _until_another(runtime, job_id, attempt):
            if not waited:
                yield LogPart(b"", 0, 0, 0, attempt or 0, complete=False)
        snapshot = await snapshot_of(runtime, job_id)
        if runtime.waiters.closing or attempt is None or snapshot.attempt <= attempt:
            return
        attempt, offset = attempt + 1, 0


async def _until_another(runtime: Runtime, job_id: str, attempt: int | None) -> AsyncIterator[bool]:
    """False every heartbeat, until there is an attempt behind this one or the job has ended."""
    with runtime.waiters.bell([job_id]) as bell:
        while not runtime.waiters.closing:
            bell.clear()
            snapshot = await snapshot_of(runtime, job_id)
            if snapshot.ended or snapshot.attempt > (attempt or 0):
                return
            await rung(bell, runtime.settings.heartbeat_s)
            yield bell.is_set()
