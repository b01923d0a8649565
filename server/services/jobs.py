"""Reading jobs, their logs and events, and asking them to stop."""

import logging
from dataclasses import dataclass

from server.db.queries import events as event_queries
from server.db.queries import jobs as job_queries
from server.domain.ids import is_job_id
from server.domain.job import Checkpoint, Job
from server.domain.states import FINAL_JOB
from server.domain.view import JobList, row_of
from server.errors import NotFound
from server.services.records import write_record
from server.services.runtime import Runtime
from server.services.snapshots import Snapshot
from server.system import clock

logger = logging.getLogger(__name__)

EVENTS_SIZE = 8 << 20
"""Characters of events in one answer, about."""


@dataclass(frozen=True)
class LogPart:
    """Bytes of an attempt's log. `next_offset` is where to read on."""

    data: bytes
    next_offset: int
    size: int
    attempt: int


def load_job(runtime: Runtime, job_id: str) -> Job:
    """A job.

    Raises:
        NotFound: there is none of that id, or the text is no id at all.
    """
    if is_job_id(job_id):
        with runtime.database.read() as session:
            job = job_queries.get_job(session, job_id)
        if job is not None:
            return job
    raise no_such_job(job_id)


def no_such_job(job_id: str) -> NotFound:
    """The answer to a wrong id."""
    return NotFound(f"there is no job {job_id[:64]!r}")


def load_snapshot(runtime: Runtime, job_id: str) -> Snapshot:
    """The serialised view of a job that is not kept ready.

    Raises:
        NotFound: there is none of that id.
    """
    return runtime.snapshots.put(load_job(runtime, job_id))


def list_jobs(runtime: Runtime, limit: int) -> JobList:
    """The newest jobs, newest first."""
    with runtime.database.read() as session:
        return JobList(jobs=[row_of(job) for job in job_queries.newest_jobs(session, limit)])


def ask_cancel(runtime: Runtime, job_id: str, grace_s: float | None) -> tuple[Job, bool]:
    """Write down that a job shall end; returns it, and False when it had ended already."""
    load_job(runtime, job_id)
    grace = runtime.settings.grace_s if grace_s is None else grace_s
    with runtime.database.write() as session:
        job_queries.ask_cancel(session, job_id, grace, clock.utc_now())
    runtime.wake()
    try:
        job = write_record(runtime, job_id)
    except OSError as error:  # a full disk must not keep a job from being stopped; the loop writes the record later
        logger.error("record of job %s cannot be written: %s", job_id, error)
        job = load_job(runtime, job_id)
    runtime.snapshots.put(job)
    return job, job.state not in FINAL_JOB


def read_log(runtime: Runtime, job_id: str, offset: int, limit: int, attempt: int | None) -> LogPart:
    """Bytes of a log, from `offset`; of the newest attempt unless one is named.

    Raises:
        NotFound: no such job, or no such attempt of it.
    """
    job = load_job(runtime, job_id)
    newest = 0 if job.attempt is None else job.attempt.number
    if attempt is not None and not 1 <= attempt <= newest:
        raise NotFound(f"job {job.id} has no attempt {attempt}")
    number = attempt or newest
    if number == 0:
        return LogPart(b"", offset, 0, 0)
    try:
        with runtime.job_dir(job.id).attempt(number).log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(min(offset, size))
            data = file.read(limit)
    except FileNotFoundError:
        return LogPart(b"", offset, 0, number)
    return LogPart(data, offset + len(data), max(size, min(offset, size) + len(data)), number)


def read_events(runtime: Runtime, job_id: str, after: int, limit: int) -> bytes:
    """Events behind a sequence number, as JSON: {"events": [...], "next_after": seq}."""
    job = load_job(runtime, job_id)
    with runtime.database.read() as session:
        found = event_queries.after(session, job.id, after, limit, EVENTS_SIZE)
    last = found[-1][0] if found else after
    return f'{{"events":[{",".join(text for _, text in found)}],"next_after":{last}}}'.encode()


def list_checkpoints(runtime: Runtime, job_id: str) -> list[Checkpoint]:
    """Checkpoints of a job, oldest first."""
    job = load_job(runtime, job_id)
    with runtime.database.read() as session:
        return event_queries.checkpoints(session, job.id)
