"""Rows made anew from job directories, in a database that holds no job yet."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import insert, update
from sqlalchemy.orm import Session

from server.db.models import AttemptTable, DependencyTable, JobTable
from server.db.queries.jobs import add_labels
from server.domain.job import Attempt, Job

NOT_IN_DIRECTORIES: tuple[str, ...] = ("login_sessions", "api_tokens", "audit_log")
"""Tables whose rows no job directory can give back."""


def insert_jobs(session: Session, jobs: Sequence[Job]) -> None:
    """Store jobs under the numbers they had, and what each waits for; what waits for a job that is gone is left out."""
    known = {job.id for job in jobs}
    for job in jobs:
        session.execute(insert(JobTable).values(_row(job)))
    for job in jobs:
        for position, needed in enumerate(job.depends_on):
            if needed.id in known:
                session.add(DependencyTable(job_id=job.id, needs_id=needed.id, position=position))
        add_labels(session, job.id, job.labels)
    session.flush()


def update_job(session: Session, job: Job) -> None:
    """Store what became of a job, whatever was stored of it."""
    session.execute(update(JobTable).where(JobTable.id == job.id).values(_row(job)))


def _row(job: Job) -> dict[str, Any]:
    return {
        "number": job.number,
        "id": job.id,
        "name": job.name,
        "stage": job.stage,
        "params": job.params,
        "output_dir": job.output_dir,
        "created_at": job.created_at,
        "state": job.state,
        "reason": job.reason,
        "cause": job.cause,
        "hint": job.hint,
        "health": job.health,
        "waiting": job.waiting,
        "started_at": job.started_at,
        "ended_at": job.ended_at,
        "cancel_asked_at": job.cancel_asked_at,
        "cancel_grace_s": job.cancel_grace_s,
        "cancel_checkpoint": job.cancel_checkpoint,
        "pause_asked_at": job.pause_asked_at,
        "pause_grace_s": job.pause_grace_s,
        "idempotency_key": job.idempotency_key,
        "body_hash": job.body_hash,
        "priority": job.priority,
        "resources": job.resources.model_dump(mode="json"),
        "pipeline_id": None if job.pipeline is None else job.pipeline.id,
        "pipeline_name": None if job.pipeline is None else job.pipeline.name,
        "retried": job.retried,
        "policy": job.policy.model_dump(mode="json"),
        "status": job.status.model_dump_json(),
        "version": job.version,
        "progress_version": job.marks.progress,
        "change_version": job.marks.change,
        "epoch_version": job.marks.epoch,
        "checkpoint_version": job.marks.checkpoint,
    }


def insert_attempt(
    session: Session, job_id: str, attempt: Attempt, created_at: datetime, exit_record: dict[str, Any] | None
) -> None:
    """Store one process life."""
    gpus = [gpu.model_dump() for gpu in attempt.gpus]
    values = {**vars(attempt), "gpus": gpus, "job_id": job_id, "created_at": created_at, "exit_record": exit_record}
    session.execute(insert(AttemptTable).values(values))


def copy_the_rest(old: Path, new: Path) -> list[str]:
    """Take over what no job directory holds from a database that can still be read; names the tables it could not."""
    lost = []
    with closing(sqlite3.connect(new, timeout=15)) as database:
        database.execute("ATTACH ? AS old", (f"{old.absolute().as_uri()}?mode=ro" if old.exists() else ":memory:",))
        for table in NOT_IN_DIRECTORIES:
            try:
                database.execute(f"INSERT INTO main.{table} SELECT * FROM old.{table}")  # noqa: S608 - a name of ours
                database.commit()
            except sqlite3.Error:
                database.rollback()
                lost.append(table)
    return lost
