"""Jobs, their dependencies and attempts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, cast

from sqlalchemy import (
    Boolean,
    Case,
    Column,
    Connection,
    CursorResult,
    Select,
    Table,
    Update,
    bindparam,
    case,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.orm import Session

from server.db.models import AttemptTable, DependencyTable, JobTable, LabelTable
from server.db.queries import leases as lease_queries
from server.domain.changes import news_of
from server.domain.job import Attempt, Dependency, Job, NewJob, PipelineRef
from server.domain.marks import Marks, Standing
from server.domain.policy import Policy
from server.domain.progress import Status
from server.domain.resources import GpuRef, Resources
from server.domain.states import FINAL_JOB, AttemptState, JobState

_CHUNK = 500

_NEWS: dict[str, Any] = dict.fromkeys(("version", "change_version", "progress_version"), JobTable.version + 1)
"""What an intent and a new attempt do to the versions."""


class Stale(Exception):
    """The row is no longer in the state it was loaded in; load it again."""


def insert_jobs(session: Session, jobs: Sequence[NewJob]) -> None:
    """Store new jobs, in this order, and what each waits for."""
    for job in jobs:
        session.add(
            JobTable(
                id=job.id,
                name=job.name,
                stage=job.stage,
                params=job.params,
                output_dir=job.output_dir,
                created_at=job.created_at,
                state=JobState.QUEUED,
                status=Status().model_dump_json(),
                policy=job.policy.model_dump(mode="json"),
                priority=job.priority,
                resources=job.resources.model_dump(mode="json"),
                pipeline_id=None if job.pipeline is None else job.pipeline.id,
                pipeline_name=None if job.pipeline is None else job.pipeline.name,
                cancel_checkpoint=True,
                idempotency_key=job.idempotency_key,
                body_hash=job.body_hash,
                version=1,
            )
        )
        session.flush()  # one by one, so that `number` follows the order
    for job in jobs:
        for position, needed in enumerate(job.depends_on):
            session.add(DependencyTable(job_id=job.id, needs_id=needed, position=position))
        add_labels(session, job.id, job.labels)
    session.flush()


def add_labels(session: Session, job_id: str, labels: Mapping[str, str]) -> None:
    """Store the labels of a job that has none."""
    for key, value in labels.items():
        session.add(LabelTable(job_id=job_id, key=key, value=value))


def get_job(session: Session, job_id: str) -> Job | None:
    """One job, or None."""
    found = load(session, select(JobTable).where(JobTable.id == job_id))
    return found[0] if found else None


def standing(session: Session, ids: Sequence[str] | None, limit: int) -> list[Standing]:
    """Of these jobs, else of the newest; newest first."""
    columns = (JobTable.id, JobTable.version, JobTable.change_version, JobTable.state)
    statement = select(*columns).order_by(JobTable.number.desc())
    statement = statement.limit(limit) if ids is None else statement.where(JobTable.id.in_(ids))
    return [Standing(*row) for row in session.execute(statement)]


def jobs_of_ids(session: Session, ids: Sequence[str]) -> list[Job]:
    """These jobs, as far as there are any; newest first."""
    return load(session, select(JobTable).where(JobTable.id.in_(ids)).order_by(JobTable.number.desc()))


def unfinished_jobs(session: Session) -> list[Job]:
    """Every job that has not ended, oldest first."""
    return load(session, select(JobTable).where(JobTable.state.not_in(FINAL_JOB)).order_by(JobTable.number))


def newest_ended(session: Session, limit: int) -> list[str]:
    """Ids of the jobs that have ended, newest first."""
    statement = select(JobTable.id).where(JobTable.state.in_(FINAL_JOB)).order_by(JobTable.number.desc())
    return list(session.scalars(statement.limit(limit)))


def ids_named(session: Session, name: str) -> list[str]:
    """Ids of the jobs with this name, newest first."""
    return list(session.scalars(select(JobTable.id).where(JobTable.name == name).order_by(JobTable.number.desc())))


def all_ids(session: Session) -> set[str]:
    """Ids of all jobs."""
    return set(session.scalars(select(JobTable.id)))


def job_exists(session: Session, job_id: str) -> bool:
    """Whether there is such a job."""
    return session.scalar(select(JobTable.number).where(JobTable.id == job_id)) is not None


def upstream_output_dirs(session: Session, job_ids: Iterable[str]) -> set[str]:
    """Output directories of these jobs and of everything they wait for."""
    seen: set[str] = set()
    queue = list(job_ids)
    while queue:
        new = [job_id for job_id in queue if job_id not in seen]
        seen.update(new)
        queue = [
            needed
            for chunk in _chunks(new)
            for needed in session.scalars(select(DependencyTable.needs_id).where(DependencyTable.job_id.in_(chunk)))
        ]
    return {
        path
        for chunk in _chunks(list(seen))
        for path in session.scalars(select(JobTable.output_dir).where(JobTable.id.in_(chunk)))
    }


def live_output_dirs(session: Session) -> dict[str, str]:
    """Output directory -> id of the unfinished job that will write there."""
    rows = session.execute(select(JobTable.output_dir, JobTable.id).where(JobTable.state.not_in(FINAL_JOB)))
    return {row.output_dir: row.id for row in rows}


def jobs_of_key(session: Session, key: str) -> list[Job]:
    """The jobs that were submitted with an idempotency key, in their order."""
    return load(session, select(JobTable).where(JobTable.idempotency_key == key).order_by(JobTable.number))


def ask_cancel(session: Session, job_id: str, grace_s: float, now: datetime, checkpoint: bool = True) -> bool:
    """Note that the job shall end; False when it has ended, or was asked before.

    A further request can only make it quicker: a shorter grace, no checkpoint.
    """
    living = update(JobTable).where(JobTable.id == job_id, JobTable.state.not_in(FINAL_JOB))
    first = living.where(JobTable.cancel_asked_at.is_(None)).values(
        cancel_asked_at=now, cancel_grace_s=grace_s, cancel_checkpoint=checkpoint, **_NEWS
    )
    if _changed(session, first) == 1:
        return True
    quicker: dict[str, Any] = {"cancel_grace_s": func.min(func.coalesce(JobTable.cancel_grace_s, grace_s), grace_s)}
    if not checkpoint:
        quicker["cancel_checkpoint"] = False
    session.execute(living.values(quicker))
    return False


def ask_pause(session: Session, job_id: str, grace_s: float, now: datetime) -> bool:
    """Note that the job shall stop until it is resumed; False when it has ended, is cancelled, or was asked before."""
    statement = (
        update(JobTable)
        .where(JobTable.id == job_id, JobTable.state.not_in(FINAL_JOB))
        .where(JobTable.cancel_asked_at.is_(None), JobTable.pause_asked_at.is_(None))
        .values(pause_asked_at=now, pause_grace_s=grace_s, **_NEWS)
    )
    return _changed(session, statement) == 1


def ask_resume(session: Session, job_id: str) -> bool:
    """Withdraw a pause; False when there is none, or the job has ended or is cancelled."""
    statement = (
        update(JobTable)
        .where(JobTable.id == job_id, JobTable.state.not_in(FINAL_JOB))
        .where(JobTable.cancel_asked_at.is_(None), JobTable.pause_asked_at.is_not(None))
        .values(pause_asked_at=None, pause_grace_s=None, **_NEWS)
    )
    return _changed(session, statement) == 1


def ask_retry(session: Session, job: Job) -> bool:
    """Have a job that ended without success queued for another attempt; False when it changed since it was loaded."""
    statement = (
        update(JobTable)
        .where(JobTable.id == job.id, JobTable.version == job.version)
        .where(JobTable.state.in_((JobState.FAILED, JobState.CANCELLED)))
        .values(
            state=JobState.QUEUED,
            retried=None if job.attempt is None else job.attempt.number,
            reason=None,
            cause=None,
            hint=None,
            ended_at=None,
            cancel_asked_at=None,
            cancel_grace_s=None,
            cancel_checkpoint=True,
            pause_asked_at=None,
            pause_grace_s=None,
            version=JobTable.version + 1,
        )
    )
    return _changed(session, statement) == 1


def begin_attempt(session: Session, job: Job, now: datetime, gpus: Sequence[GpuRef] = ()) -> Job:
    """Store that a queued job gets a process, and these GPUs; its resources are resolved by now.

    Raises:
        Stale: it is not queued any more, was cancelled or paused meanwhile, or a GPU is held by another attempt.
    """
    last = job.attempt
    statement = (
        update(JobTable)
        .where(JobTable.id == job.id, JobTable.state == job.state)
        .where(JobTable.cancel_asked_at.is_(None), JobTable.pause_asked_at.is_(None))
        .values(
            state=JobState.STARTING,
            waiting=None,
            resources=job.resources.model_dump(mode="json"),
            **_NEWS,
        )
    )
    if _changed(session, statement) != 1:
        raise Stale(job.id)
    row: dict[str, Any] = {
        "job_id": job.id,
        "number": 1 if last is None else last.number + 1,
        "state": AttemptState.STARTING,
        "event_offset": 0,
        "created_at": now,
        "retries": job.retries,
        "gpus": [gpu.model_dump() for gpu in gpus],
    }
    session.execute(insert(AttemptTable).values(row))
    if lease_queries.take(session, job.id, row["number"], gpus) < len(gpus):
        raise Stale(job.id)
    fresh = get_job(session, job.id)
    assert fresh is not None
    return fresh


def note_gpus(session: Session, job_id: str, attempt: int, gpus: Sequence[GpuRef]) -> None:
    """Store which GPUs an attempt was given, as its directory tells."""
    row = update(AttemptTable).where(AttemptTable.job_id == job_id, AttemptTable.number == attempt)
    session.execute(row.values(gpus=[gpu.model_dump() for gpu in gpus]))


_JOBS = cast("Table", JobTable.__table__)
_ATTEMPTS = cast("Table", AttemptTable.__table__)


def _at_news(mark: Column[int], occurred: str) -> Case[int]:
    """The coming version where the parameter says that such news occurred, else the mark as it is."""
    return case((bindparam(occurred, type_=Boolean), _JOBS.c.version + 1), else_=mark)


# Made once: the loop runs them for every event of every job, and putting a statement together costs ten times what
# running it does. Values come with the parameters of the columns' names.
_SAVE_JOB = (
    update(_JOBS)
    .where(
        _JOBS.c.id == bindparam("old_id"),
        _JOBS.c.state == bindparam("old_state"),
        _JOBS.c.cancel_asked_at.is_not(None) == bindparam("old_cancelled", type_=Boolean),
        _JOBS.c.pause_asked_at.is_not(None) == bindparam("old_paused", type_=Boolean),
    )
    .values(
        version=_JOBS.c.version + 1,
        progress_version=_at_news(_JOBS.c.progress_version, "progressed"),
        change_version=_at_news(_JOBS.c.change_version, "changed"),
        epoch_version=_at_news(_JOBS.c.epoch_version, "epoch_over"),
        checkpoint_version=_at_news(_JOBS.c.checkpoint_version, "checkpoint_told"),
    )
)
_SAVE_ATTEMPT = update(_ATTEMPTS).where(
    _ATTEMPTS.c.job_id == bindparam("old_id"),
    _ATTEMPTS.c.number == bindparam("old_number"),
    _ATTEMPTS.c.state == bindparam("old_state"),
    _ATTEMPTS.c.event_offset == bindparam("old_offset"),
)
_INTENTS = select(
    _JOBS.c.version,
    _JOBS.c.progress_version,
    _JOBS.c.change_version,
    _JOBS.c.epoch_version,
    _JOBS.c.checkpoint_version,
    _JOBS.c.cancel_asked_at,
    _JOBS.c.cancel_grace_s,
    _JOBS.c.cancel_checkpoint,
    _JOBS.c.pause_asked_at,
    _JOBS.c.pause_grace_s,
).where(_JOBS.c.id == bindparam("job_id"))


def save(session: Session, old: Job, new: Job, exit_record: dict[str, Any] | None = None) -> Job:
    """Replace what the loop knows of a job; returns it with its new version.

    Raises:
        Stale: the stored job or attempt is not in the state `old` has, or a cancel, pause or resume was asked since; it
            would otherwise end as if nobody had asked.
    """
    news = news_of(old, new)
    values = {
        "old_id": old.id,
        "old_state": old.state,
        "old_cancelled": old.cancel_asked_at is not None,
        "old_paused": old.pause_asked_at is not None,
        "state": new.state,
        "reason": new.reason,
        "cause": new.cause,
        "hint": new.hint,
        "health": new.health,
        "waiting": new.waiting,
        "started_at": new.started_at,
        "ended_at": new.ended_at,
        "status": new.status.model_dump_json(),
        "progressed": news.progress,
        "changed": news.change,
        "epoch_over": news.epoch,
        "checkpoint_told": news.checkpoint,
    }
    connection = session.connection()
    if connection.execute(_SAVE_JOB, values).rowcount != 1:
        raise Stale(old.id)
    if new.cancel_asked_at is not None and old.cancel_asked_at is None:
        ask = update(JobTable).where(JobTable.id == old.id, JobTable.cancel_asked_at.is_(None))
        session.execute(ask.values(cancel_asked_at=new.cancel_asked_at, cancel_grace_s=new.cancel_grace_s))
    if new.attempt is not None:
        _save_attempt(connection, old, new, exit_record)
    version, progress, change, epoch, checkpoint, *asked = connection.execute(_INTENTS, {"job_id": new.id}).one()
    cancel_asked_at, cancel_grace_s, cancel_checkpoint, pause_asked_at, pause_grace_s = asked
    return replace(
        new,
        version=version,
        marks=Marks(progress, change, epoch, checkpoint),
        cancel_asked_at=cancel_asked_at,
        cancel_grace_s=cancel_grace_s,
        cancel_checkpoint=cancel_checkpoint,
        pause_asked_at=pause_asked_at,
        pause_grace_s=pause_grace_s,
    )


def _save_attempt(connection: Connection, old: Job, new: Job, exit_record: dict[str, Any] | None) -> None:
    assert old.attempt is not None
    assert new.attempt is not None
    values: dict[str, Any] = {
        "old_id": old.id,
        "old_number": old.attempt.number,
        "old_state": old.attempt.state,
        "old_offset": old.attempt.event_offset,
        "state": new.attempt.state,
        "event_offset": new.attempt.event_offset,
        "started_at": new.attempt.started_at,
        "stop_asked_at": new.attempt.stop_asked_at,
        "stop_for": new.attempt.stop_for,
        "reason": new.attempt.reason,
        "cause": new.attempt.cause,
        "ended_at": new.attempt.ended_at,
    }
    if exit_record is not None:
        values["exit_record"] = exit_record
    if connection.execute(_SAVE_ATTEMPT, values).rowcount != 1:
        raise Stale(old.id)


def _changed(session: Session, statement: Update) -> int:
    return cast("CursorResult[Any]", session.execute(statement)).rowcount


def _chunks(ids: Sequence[str]) -> list[Sequence[str]]:
    return [ids[start : start + _CHUNK] for start in range(0, len(ids), _CHUNK)]


def load(session: Session, statement: Select[JobTable]) -> list[Job]:
    """The jobs a statement finds, in its order, with all that belongs to them."""
    rows = list(session.scalars(statement, execution_options={"populate_existing": True}))
    ids = [row.id for row in rows]
    needs: dict[str, list[Dependency]] = {}
    attempts: dict[str, AttemptTable] = {}
    labels: dict[str, dict[str, str]] = {}
    for chunk in _chunks(ids):
        joined = (
            select(DependencyTable.job_id, JobTable.id, JobTable.name, JobTable.state, JobTable.reason)
            .join(JobTable, JobTable.id == DependencyTable.needs_id)
            .where(DependencyTable.job_id.in_(chunk))
            .order_by(DependencyTable.position)
        )
        for job_id, needed, name, state, reason in session.execute(joined):
            needs.setdefault(job_id, []).append(Dependency(needed, name, JobState(state), reason))
        lives = select(AttemptTable).where(AttemptTable.job_id.in_(chunk)).order_by(AttemptTable.number)
        for attempt in session.scalars(lives, execution_options={"populate_existing": True}):
            attempts[attempt.job_id] = attempt
        for label in session.scalars(select(LabelTable).where(LabelTable.job_id.in_(chunk)).order_by(LabelTable.key)):
            labels.setdefault(label.job_id, {})[label.key] = label.value
    return [_job(row, tuple(needs.get(row.id, ())), attempts.get(row.id), labels.get(row.id, {})) for row in rows]


def _job(
    row: JobTable, depends_on: tuple[Dependency, ...], attempt: AttemptTable | None, labels: Mapping[str, str]
) -> Job:
    return Job(
        number=row.number,
        id=row.id,
        name=row.name,
        stage=row.stage,
        params=row.params,
        output_dir=row.output_dir,
        created_at=row.created_at,
        state=JobState(row.state),
        reason=row.reason,
        cause=row.cause,
        hint=row.hint,
        health=row.health,
        waiting=row.waiting,
        started_at=row.started_at,
        ended_at=row.ended_at,
        cancel_asked_at=row.cancel_asked_at,
        cancel_grace_s=row.cancel_grace_s,
        cancel_checkpoint=row.cancel_checkpoint,
        pause_asked_at=row.pause_asked_at,
        pause_grace_s=row.pause_grace_s,
        idempotency_key=row.idempotency_key,
        body_hash=row.body_hash,
        policy=Policy.model_validate(row.policy),
        priority=row.priority,
        resources=Resources.model_validate(row.resources),
        labels=labels,
        pipeline=None if row.pipeline_id is None else PipelineRef(row.pipeline_id, row.pipeline_name or ""),
        retried=row.retried,
        version=row.version,
        marks=Marks(row.progress_version, row.change_version, row.epoch_version, row.checkpoint_version),
        status=Status.model_validate_json(row.status),
        depends_on=depends_on,
        attempt=None if attempt is None else attempt_of(attempt),
    )


def attempt_of(row: AttemptTable) -> Attempt:
    """A row as the daemon handles it."""
    return Attempt(
        number=row.number,
        state=AttemptState(row.state),
        event_offset=row.event_offset,
        started_at=row.started_at,
        stop_asked_at=row.stop_asked_at,
        stop_for=row.stop_for,
        retries=row.retries,
        reason=row.reason,
        cause=row.cause,
        ended_at=row.ended_at,
        gpus=tuple(GpuRef.model_validate(gpu) for gpu in row.gpus),
    )
