"""Many jobs at once: pages of the list, pipelines, attempts, and counts."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import exists, func, select
from sqlalchemy.orm import Session

from server.db.models import AttemptTable, JobTable, LabelTable
from server.db.queries.jobs import attempt_of, load
from server.domain.job import Attempt, Job, PipelineRef
from server.domain.listing import JobFilter
from server.domain.states import FINAL_JOB, JobState


@dataclass(frozen=True)
class StoredAttempt:
    """An attempt with what is kept of its end."""

    attempt: Attempt
    created_at: datetime
    exit_record: dict[str, Any] | None


def page(session: Session, wanted: JobFilter, limit: int, before: int | None = None) -> list[Job]:
    """The newest jobs that are meant, newest first, of those with a number under `before`."""
    statement = select(JobTable).order_by(JobTable.number.desc()).limit(limit)
    if before is not None:
        statement = statement.where(JobTable.number < before)
    for column, values in (
        (JobTable.state, wanted.states),
        (JobTable.stage, wanted.stages),
        (JobTable.name, wanted.names),
    ):
        if values:
            statement = statement.where(column.in_(values))
    if wanted.since is not None:
        statement = statement.where(JobTable.created_at >= wanted.since)
    if wanted.pipeline is not None:
        statement = statement.where(JobTable.pipeline_id == wanted.pipeline)
    for key, values in wanted.labels.items():
        label = exists().where(LabelTable.job_id == JobTable.id, LabelTable.key == key)
        statement = statement.where(label.where(LabelTable.value.in_(values)) if values else label)
    return load(session, statement)


def jobs_of_pipeline(session: Session, pipeline_id: str) -> list[Job]:
    """Its jobs, in the order of the document; none when there is no such pipeline."""
    return load(session, select(JobTable).where(JobTable.pipeline_id == pipeline_id).order_by(JobTable.number))


def pipelines(session: Session, limit: int, before: int | None = None) -> list[tuple[int, PipelineRef]]:
    """Number of the first job and name of the newest pipelines, newest first."""
    first = func.min(JobTable.number)
    statement = (
        select(first, JobTable.pipeline_id, func.min(JobTable.pipeline_name))
        .where(JobTable.pipeline_id.is_not(None))
        .group_by(JobTable.pipeline_id)
        .order_by(first.desc())
        .limit(limit)
    )
    if before is not None:
        statement = statement.having(first < before)
    return [(number, PipelineRef(str(one), str(name))) for number, one, name in session.execute(statement)]


def attempts(session: Session, job_id: str) -> list[StoredAttempt]:
    """The attempts of a job, oldest first."""
    rows = session.scalars(select(AttemptTable).where(AttemptTable.job_id == job_id).order_by(AttemptTable.number))
    return [StoredAttempt(attempt_of(row), row.created_at, row.exit_record) for row in rows]


def counts_by_state(session: Session) -> dict[str, int]:
    """How many jobs are in each state; states that none is in are left out."""
    return _counted(session.execute(select(JobTable.state, func.count()).group_by(JobTable.state)))


def reasons_since(session: Session, since: datetime) -> dict[str, int]:
    """Reason -> how many jobs ended with it since then."""
    statement = (
        select(JobTable.reason, func.count())
        .where(JobTable.ended_at >= since, JobTable.reason.is_not(None))
        .group_by(JobTable.reason)
    )
    return _counted(session.execute(statement))


def ended_since(session: Session, since: datetime) -> dict[str, int]:
    """State -> how many jobs ended in it since then."""
    statement = (
        select(JobTable.state, func.count())
        .where(JobTable.ended_at >= since, JobTable.state.in_(FINAL_JOB))
        .group_by(JobTable.state)
    )
    return _counted(session.execute(statement))


def attempt_reasons(session: Session) -> dict[str, int]:
    """Reason -> how many attempts ended with it."""
    statement = (
        select(AttemptTable.reason, func.count()).where(AttemptTable.reason.is_not(None)).group_by(AttemptTable.reason)
    )
    return _counted(session.execute(statement))


def oldest_queued(session: Session) -> datetime | None:
    """When the job that waits longest was submitted."""
    return session.scalar(select(func.min(JobTable.created_at)).where(JobTable.state == JobState.QUEUED))


def attempts_with_gpus(session: Session, since: datetime) -> list[tuple[datetime, datetime | None, int]]:
    """(start, end, number of GPUs) of each attempt that had any and ran at some time since then."""
    statement = select(AttemptTable.started_at, AttemptTable.ended_at, AttemptTable.gpus).where(
        AttemptTable.started_at.is_not(None),
        (AttemptTable.ended_at >= since) | AttemptTable.ended_at.is_(None),
    )
    return [(row.started_at, row.ended_at, len(row.gpus)) for row in session.execute(statement) if row.gpus]


def last_ended(session: Session, stage: str, limit: int) -> list[Job]:
    """The newest jobs of a stage that succeeded, newest first."""
    statement = select(JobTable).where(JobTable.stage == stage, JobTable.state == JobState.SUCCEEDED)
    return load(session, statement.order_by(JobTable.number.desc()).limit(limit))


def _counted(rows: Iterable[Any]) -> dict[str, int]:
    return {str(word): count for word, count in sorted(rows)}
