"""Forgetting a job for good."""

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from server.db.models import DependencyTable, GpuLeaseTable, JobTable
from server.domain.states import FINAL_JOB


def waiting_for(session: Session, job_id: str) -> list[str]:
    """Ids of the unfinished jobs that wait for this one, directly."""
    statement = (
        select(JobTable.id)
        .join(DependencyTable, DependencyTable.job_id == JobTable.id)
        .where(DependencyTable.needs_id == job_id, JobTable.state.not_in(FINAL_JOB))
        .order_by(JobTable.number)
    )
    return list(session.scalars(statement))


def holds_gpus(session: Session, job_id: str) -> bool:
    """Whether a GPU is still held for it: processes of its last attempt live."""
    return session.scalar(select(GpuLeaseTable.uuid).where(GpuLeaseTable.job_id == job_id).limit(1)) is not None


def other_output_dirs(session: Session, job_id: str) -> dict[str, str]:
    """Output directory -> id of every other job, ended ones too."""
    rows = session.execute(select(JobTable.output_dir, JobTable.id).where(JobTable.id != job_id))
    return {row.output_dir: row.id for row in rows}


def delete_job(session: Session, job_id: str) -> list[str] | None:
    """Remove a job with its attempts, events, checkpoints and labels; jobs that waited for it forget that.

    Returns:
        Ids of the ended jobs that had waited for it. None when it was left alone: it has not ended, or an unfinished
        job waits for it.
    """
    state = session.scalar(select(JobTable.state).where(JobTable.id == job_id))
    if state is not None and (state not in FINAL_JOB or waiting_for(session, job_id)):
        return None
    had_waited = list(session.scalars(select(DependencyTable.job_id).where(DependencyTable.needs_id == job_id)))
    session.execute(update(JobTable).where(JobTable.id.in_(had_waited)).values(version=JobTable.version + 1))
    session.execute(delete(DependencyTable).where(DependencyTable.needs_id == job_id))
    session.execute(delete(JobTable).where(JobTable.id == job_id))
    return had_waited
