"""The attempts of a job: each process life with its end, and another one when somebody asks."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from server.db.queries import jobs as job_queries
from server.db.queries import listing
from server.domain.job import Job
from server.domain.resources import GpuRef
from server.domain.states import FINAL_JOB, LIVE_ATTEMPT, AttemptState, JobState
from server.errors import Conflict
from server.services.jobs import intent_written, load_job
from server.services.paths import path_error, taken
from server.services.runtime import Runtime
from server.system.beneath import open_beneath

MAX_EXIT_BYTES = 1 << 16


class AttemptRow(BaseModel):
    """One process life."""

    number: int
    state: AttemptState
    reason: str | None = Field(description="why it ended without success, in one word")
    cause: str | None
    stop_for: str | None = Field(description="who had it stopped first: cancel, pause, or a policy's reason")
    created_at: datetime
    started_at: datetime | None
    stop_asked_at: datetime | None
    ended_at: datetime | None
    gpus: list[GpuRef]
    exit: dict[str, Any] | None = Field(
        description="exit.json: code or signal, seconds, rusage ...; null while it lives, or when it was lost"
    )
    log_bytes: int | None = Field(description="size of its log; null when it has none")


class AttemptList(BaseModel):
    """Oldest first."""

    attempts: list[AttemptRow]


def list_attempts(runtime: Runtime, job_id: str) -> AttemptList:
    """The attempts of a job, oldest first.

    Raises:
        NotFound: there is none of that id.
    """
    job = load_job(runtime, job_id)
    with runtime.database.read() as session:
        found = listing.attempts(session, job.id)
    return AttemptList(attempts=[_row(runtime, job.id, one) for one in found])


def _row(runtime: Runtime, job_id: str, stored: listing.StoredAttempt) -> AttemptRow:
    attempt = stored.attempt
    lives = attempt.state in LIVE_ATTEMPT
    return AttemptRow(
        number=attempt.number,
        state=attempt.state,
        reason=attempt.reason,
        cause=attempt.cause,
        stop_for=attempt.stop_for,
        created_at=stored.created_at,
        started_at=attempt.started_at,
        stop_asked_at=attempt.stop_asked_at,
        ended_at=attempt.ended_at,
        gpus=list(attempt.gpus),
        exit=None if lives else _exit(runtime, job_id, attempt.number) or stored.exit_record,
        log_bytes=_log_bytes(runtime, job_id, attempt.number),
    )


def _exit(runtime: Runtime, job_id: str, number: int) -> dict[str, Any] | None:
    """exit.json as the shim wrote it; None where there is none, or damage."""
    try:
        with open_beneath(runtime.settings.jobs_dir, runtime.job_dir(job_id).attempt(number).exit) as file:
            found = json.loads(file.read(MAX_EXIT_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _log_bytes(runtime: Runtime, job_id: str, number: int) -> int | None:
    try:
        with open_beneath(runtime.settings.jobs_dir, runtime.job_dir(job_id).attempt(number).log) as file:
            return file.seek(0, 2)
    except OSError:
        return None


def ask_retry(runtime: Runtime, job_id: str) -> Job:
    """Give a job that failed or was cancelled another attempt, with the same output directory.

    Raises:
        NotFound: there is none of that id.
        Conflict: it has not ended, it succeeded, what it waits for did not succeed, or another job writes where it did.
    """
    job = load_job(runtime, job_id)
    _refuse_retry(runtime, job)
    # A cancel is an order to every attempt; this one is over.
    runtime.job_dir(job_id).cancel.unlink(missing_ok=True)
    with runtime.database.write() as session:
        done = job_queries.ask_retry(session, job)
    if not done:
        raise Conflict(f"job {job_id} has changed meanwhile; look at it and ask again")
    return intent_written(runtime, job_id)


def _refuse_retry(runtime: Runtime, job: Job) -> None:
    if job.state not in FINAL_JOB:
        raise Conflict(f"job {job.id} has not ended: it is {job.state}")
    if job.state == JobState.SUCCEEDED:
        raise Conflict(f"job {job.id} succeeded; submit it anew to have it done again")
    for needed in job.depends_on:
        if needed.state in (JobState.FAILED, JobState.CANCELLED):
            text = f"job {job.id} waits for {needed.name} ({needed.id}), which is {needed.state}: retry that one first"
            raise Conflict(text, path_error("/depends_on", text))
    with runtime.database.read() as session:
        claimed = {Path(path): f"job {one}" for path, one in job_queries.live_output_dirs(session).items()}
    if (fault := taken(job.output_dir, claimed)) is not None:
        raise Conflict(f"job {job.id} cannot be tried again: {fault}")
