"""GPUs that are held. A row is there from the begin of an attempt until all its processes are gone."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from sqlalchemy import CursorResult, delete, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.orm import Session

from server.db.models import GpuLeaseTable
from server.domain.resources import GpuRef


class Lease(NamedTuple):
    """A GPU and the attempt that holds it."""

    uuid: str
    job_id: str
    attempt: int


def take(session: Session, job_id: str, attempt: int, gpus: Sequence[GpuRef]) -> int:
    """Hold GPUs for an attempt; returns how many of them are its own now. One that another holds stays with that."""
    held = 0
    for gpu in gpus:
        lease = {"uuid": gpu.uuid, "job_id": job_id, "attempt": attempt}
        session.execute(insert(GpuLeaseTable).values(lease).on_conflict_do_nothing())
        row = session.execute(
            select(GpuLeaseTable.job_id, GpuLeaseTable.attempt).where(GpuLeaseTable.uuid == gpu.uuid)
        ).one()
        held += tuple(row) == (job_id, attempt)
    return held


def every(session: Session) -> list[Lease]:
    """All leases."""
    rows = session.execute(select(GpuLeaseTable.uuid, GpuLeaseTable.job_id, GpuLeaseTable.attempt))
    return [Lease(*row) for row in rows]


def release(session: Session, job_id: str, attempt: int) -> int:
    """Give back what an attempt held; returns how many GPUs that were."""
    statement = delete(GpuLeaseTable).where(GpuLeaseTable.job_id == job_id, GpuLeaseTable.attempt == attempt)
    return cast("CursorResult[Any]", session.execute(statement)).rowcount
