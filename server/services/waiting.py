"""Long polls: a request that is answered when there is something to say, or when its time is over.

since (the version the client knows)  --compared with--> the marks of the job (server/domain/marks.py)
"""

import asyncio
import hashlib
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from fastapi.concurrency import run_in_threadpool

from server.db.queries import jobs as job_queries
from server.domain.ids import is_job_id
from server.domain.marks import Standing, Until
from server.domain.states import FINAL_JOB
from server.errors import Stopping
from server.services.jobs import load_snapshot, no_such_job
from server.services.runtime import Runtime
from server.services.snapshots import Snapshot
from server.services.waiters import ANY, rung

FOREIGN = -1
"""The version of a client that knows another database, or nothing we gave it: everything is new to it."""

LIST_PACE_S = 0.05
"""Between looks at a list: any of its jobs may tell of progress a hundred times a second."""

_DIGEST = 10


class Outcome(StrEnum):
    """Why a request that waited is answered."""

    MET = "met"
    ENDED = "ended"
    TIMEOUT = "timeout"


async def snapshot_of(runtime: Runtime, job_id: str) -> Snapshot:
    """The view of a job.

    Raises:
        NotFound: there is none of that id.
    """
    ready = runtime.snapshots.get(job_id)
    return ready if ready is not None else await run_in_threadpool(load_snapshot, runtime, job_id)


async def hold(
    runtime: Runtime, job_id: str, until: Until, since: int | None, limit_s: float
) -> tuple[Snapshot, Outcome]:
    """The job once what is waited for has occurred, once it has ended, or after `limit_s` seconds.

    `since` is the version the client knows; without it, whatever the job is at now.

    Raises:
        NotFound: there is no such job.
        Stopping: the daemon is being stopped.
    """
    end = asyncio.get_running_loop().time() + limit_s
    with runtime.waiters.bell([job_id]) as bell:
        while True:
            bell.clear()
            snapshot = await snapshot_of(runtime, job_id)
            if snapshot.ended:
                return snapshot, Outcome.ENDED
            since = snapshot.version if since is None else since
            if since > snapshot.version:
                since = FOREIGN
            mark = snapshot.marks.of(until)
            if mark is not None and mark > since:
                return snapshot, Outcome.MET
            left = end - asyncio.get_running_loop().time()
            if left <= 0:
                return snapshot, Outcome.TIMEOUT
            _refuse_when_stopping(runtime)
            await rung(bell, left)


class ListState(NamedTuple):
    """What a list of jobs stands at: digests of their versions and of their latest changes; how many have not ended."""

    versions: str
    changes: str
    unfinished: int


def list_state(rows: Sequence[Standing]) -> ListState:
    """The state of a list, from its rows."""
    return ListState(
        _digest(f"{row.id} {row.version}" for row in rows),
        _digest(f"{row.id} {row.change_version}" for row in rows),
        sum(row.state not in FINAL_JOB for row in rows),
    )


async def hold_list(
    runtime: Runtime, ids: Sequence[str], until: Until, known: str | None, limit: int, limit_s: float
) -> Outcome:
    """Wait for news of any of many jobs: of those named, else of the `limit` newest.

    What is waited for is a change, progress, or that one has ended. `known` are the `versions` (for progress) or the
    `changes` of the list the client has; without it, of the list as it is now. Named jobs that have all ended are not
    waited for.

    Raises:
        NotFound: there is no such job.
        Stopping: the daemon is being stopped.
    """
    end = asyncio.get_running_loop().time() + limit_s
    with runtime.waiters.bell(ids or [ANY]) as bell:
        while True:
            bell.clear()
            state = list_state(await run_in_threadpool(_standing, runtime, ids, limit))
            if ids and state.unfinished < (len(ids) if until == Until.TERMINAL else 1):
                return Outcome.ENDED
            present = state.versions if until == Until.PROGRESS else state.changes
            known = present if known is None else known
            if until != Until.TERMINAL and present != known:
                return Outcome.MET
            left = end - asyncio.get_running_loop().time()
            if left <= 0:
                return Outcome.TIMEOUT
            _refuse_when_stopping(runtime)
            await rung(bell, left)
            await asyncio.sleep(min(LIST_PACE_S, max(0.0, left)))


def _standing(runtime: Runtime, ids: Sequence[str], limit: int) -> list[Standing]:
    with runtime.database.read() as session:
        rows = job_queries.standing(session, ids or None, limit)
    refuse_unknown(ids, [row.id for row in rows])
    return rows


def refuse_unknown(ids: Sequence[str], found: Sequence[str]) -> None:
    """See that every job that was named is there.

    Raises:
        NotFound: the first that is not.
    """
    for job_id in ids:
        if not is_job_id(job_id) or job_id not in found:
            raise no_such_job(job_id)


def _refuse_when_stopping(runtime: Runtime) -> None:
    if runtime.waiters.closing:
        raise Stopping("the daemon is being stopped; jobs go on. Ask again in a moment")


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:_DIGEST]
