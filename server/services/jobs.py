"""Reading jobs and their events, and asking them to stop, pause, go on or save."""

import logging
import secrets
from collections.abc import Sequence
from dataclasses import replace

from eagle3_core.contract.params import AdoptParams, TrainParams
from server.db.queries import events as event_queries
from server.db.queries import jobs as job_queries
from server.db.queries import listing
from server.domain.ids import is_job_id
from server.domain.job import Checkpoint, Job
from server.domain.listing import ALL_JOBS, JobFilter, cursor_before, number_of_cursor
from server.domain.states import FINAL_JOB, JobState
from server.errors import Conflict, FieldError, InsufficientStorage, Invalid, NotFound, Unavailable
from server.services.orders import order_once, order_stop
from server.services.records import Gone, write_record
from server.services.runtime import Runtime
from server.services.snapshots import Snapshot
from server.system import clock

logger = logging.getLogger(__name__)

EVENTS_SIZE = 8 << 20
"""Characters of events in one answer, about."""


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
    return NotFound(f"there is no job {job_id!r}")


def load_snapshot(runtime: Runtime, job_id: str) -> Snapshot:
    """The serialised view of a job that is not kept ready.

    Raises:
        NotFound: there is none of that id.
    """
    return runtime.snapshots.put(load_job(runtime, job_id))


def list_jobs(
    runtime: Runtime, limit: int, wanted: JobFilter = ALL_JOBS, cursor: str | None = None, ids: Sequence[str] = ()
) -> tuple[list[Job], str | None]:
    """A page of the jobs that are meant, newest first, and the cursor of the next one; or the jobs that are named.

    Raises:
        Invalid: the cursor is none.
    """
    before = None if cursor is None else read_cursor(cursor)
    with runtime.database.read() as session:
        if ids:
            return job_queries.jobs_of_ids(session, ids), None
        found = listing.page(session, wanted, limit + 1, before)
    more = cursor_before(found[limit - 1].number) if len(found) > limit else None
    return found[:limit], more


def read_cursor(cursor: str) -> int:
    """The number in a cursor.

    Raises:
        Invalid: it is none.
    """
    try:
        return number_of_cursor(cursor)
    except ValueError:
        text = "is not a cursor; send what an answer gave as next_cursor, or leave it out for the first page"
        raise Invalid.of([FieldError("?cursor", text)]) from None


def ask_cancel(runtime: Runtime, job_id: str, grace_s: float | None, checkpoint: bool) -> tuple[Job, bool]:
    """Write down that a job shall end; returns it, and False when it had ended already."""
    job = load_job(runtime, job_id)
    grace = runtime.settings.grace_s if grace_s is None else grace_s
    try:
        with runtime.database.write() as session:
            job_queries.ask_cancel(session, job_id, grace, clock.utc_now(), checkpoint)
    except Unavailable as error:
        return _cancel_by_file(runtime, job, grace, checkpoint, error), job.state not in FINAL_JOB
    job = intent_written(runtime, job_id)
    return job, job.state not in FINAL_JOB


def _cancel_by_file(runtime: Runtime, job: Job, grace_s: float, checkpoint: bool, error: Unavailable) -> Job:
    """Order a stop where the database cannot be written: the shim reads the file, the loop stores it later.

    Raises:
        Unavailable: nor can the file be made.
    """
    if job.state in FINAL_JOB:
        return job
    try:
        order_stop(runtime.job_dir(job.id), grace_s, checkpoint)
    except OSError:
        raise error from None
    logger.warning("job %s is cancelled by file: %s", job.id, error.detail)
    runtime.unstored_cancels[job.id] = (grace_s, checkpoint)
    runtime.wake()
    return replace(job, cancel_asked_at=job.cancel_asked_at or clock.utc_now())


def ask_pause(runtime: Runtime, job_id: str, grace_s: float | None) -> Job:
    """Write down that a job shall stop until it is resumed.

    Raises:
        NotFound: there is none of that id.
        Conflict: it has ended, or is cancelled, or its process is not ours to stop.
    """
    if load_job(runtime, job_id).stage == AdoptParams.stage:
        raise Conflict(f"job {job_id} only watches a process that is not ours, which it never stops; cancel ends it")
    grace = runtime.settings.grace_s if grace_s is None else grace_s
    with runtime.database.write() as session:
        job_queries.ask_pause(session, job_id, grace, clock.utc_now())
    job = intent_written(runtime, job_id)
    if job.pause_asked_at is None or job.cancel_asked_at is not None or job.state in FINAL_JOB:
        raise Conflict(f"job {job_id} cannot be paused: it {_ending(job)}")
    return job


def ask_resume(runtime: Runtime, job_id: str) -> Job:
    """Withdraw a pause; the job goes on through the queue.

    Raises:
        NotFound: there is none of that id.
        Conflict: it is not paused.
    """
    load_job(runtime, job_id)
    with runtime.database.write() as session:
        done = job_queries.ask_resume(session, job_id)
    job = intent_written(runtime, job_id)
    if not done:
        ending = job.state in FINAL_JOB or job.cancel_asked_at is not None
        why = _ending(job) if ending else f"is {job.state} and not paused"
        raise Conflict(f"job {job_id} cannot be resumed: it {why}")
    return job


def ask_checkpoint(runtime: Runtime, job_id: str) -> str:
    """Have a training save at its next step; returns the id of the request.

    Raises:
        NotFound: there is none of that id.
        Conflict: it is no training, or does not run.
        InsufficientStorage: the disk is full.
    """
    job = load_job(runtime, job_id)
    if job.stage != TrainParams.stage or job.state != JobState.RUNNING:
        what = f"is {job.state}" if job.stage == TrainParams.stage else f"is of the stage {job.stage}"
        raise Conflict(f"only a running training writes a checkpoint when asked; job {job_id} {what}")
    request_id = secrets.token_hex(8)
    try:
        order_once(runtime.job_dir(job_id).checkpoint, request_id)
    except OSError as error:
        raise InsufficientStorage(f"the request cannot be written: {error}") from error
    return request_id


def _ending(job: Job) -> str:
    return f"has ended ({job.state})" if job.state in FINAL_JOB else "is being cancelled"


def intent_written(runtime: Runtime, job_id: str) -> Job:
    """Wake the loop, bring the record up to date, show the job."""
    runtime.wake()
    try:
        job = write_record(runtime, job_id)
    except Gone:
        raise no_such_job(job_id) from None
    except OSError as error:  # a full disk must not keep a job from being stopped; the loop writes the record later
        logger.error("record of job %s cannot be written: %s", job_id, error)
        job = load_job(runtime, job_id)
    runtime.snapshots.put(job)
    return job


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
