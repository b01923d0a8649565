"""Events and the checkpoints they tell of."""

from collections.abc import Iterator, Sequence
from typing import cast

from sqlalchemy import Table, insert, select, update
from sqlalchemy.orm import Session

from eagle3_core.contract.events import CheckpointEvent, CheckpointRemovedEvent, Event, VerdictEvent
from server.db.models import CheckpointTable, EventTable
from server.domain.job import Checkpoint

_INSERT = insert(cast("Table", EventTable.__table__))


def record(session: Session, job_id: str, attempt: int, events: Sequence[tuple[Event, str]]) -> None:
    """Store new events with their text, and what they say of checkpoints."""
    if not events:
        return
    rows = [
        {"job_id": job_id, "seq": event.seq, "attempt": attempt, "type": event.type, "body": text}
        for event, text in events
    ]
    session.connection().execute(_INSERT, rows)
    for event, _ in events:
        if isinstance(event, CheckpointEvent | VerdictEvent):
            _note_checkpoint(session, job_id, event)
        elif isinstance(event, CheckpointRemovedEvent):
            known = update(CheckpointTable).where(CheckpointTable.job_id == job_id, CheckpointTable.path == event.path)
            session.execute(known.values(removed_at=event.time))


def _note_checkpoint(session: Session, job_id: str, event: CheckpointEvent | VerdictEvent) -> None:
    known = select(CheckpointTable).where(CheckpointTable.job_id == job_id, CheckpointTable.path == event.path)
    row = session.scalar(known)
    if row is None:
        row = CheckpointTable(job_id=job_id, path=event.path, findings=[], created_at=event.time)
        session.add(row)
    if isinstance(event, CheckpointEvent):
        row.epoch, row.step, row.bytes, row.created_at = event.epoch, event.step, event.bytes, event.time
        row.verdict, row.findings, row.judged_at = None, [], None  # written anew by a later attempt
        row.level, row.servers = None, None
        row.removed_at = None
    else:
        row.verdict, row.findings = event.verdict, event.findings
        row.level, row.servers = event.level, event.servers
        row.seconds, row.judged_at = event.seconds, event.time
    session.flush()


def after(session: Session, job_id: str, seq: int, limit: int, size: int) -> list[tuple[int, str]]:
    """Sequence number and text of the events behind `seq`, oldest first; at most `limit`, about `size` characters."""
    statement = (
        select(EventTable.seq, EventTable.body)
        .where(EventTable.job_id == job_id, EventTable.seq > seq)
        .order_by(EventTable.seq)
        .limit(limit)
    )
    found: list[tuple[int, str]] = []
    for row in session.execute(statement):
        found.append((row.seq, row.body))
        size -= len(row.body)
        if size <= 0:
            break
    return found


def of_types(session: Session, job_id: str, types: Sequence[str]) -> Iterator[str]:
    """The text of each event of these types, in order, without holding them all."""
    statement = (
        select(EventTable.body)
        .where(EventTable.job_id == job_id, EventTable.type.in_(types))
        .order_by(EventTable.seq)
        .execution_options(yield_per=500)
    )
    yield from session.scalars(statement)


def checkpoints(session: Session, job_id: str) -> list[Checkpoint]:
    """Checkpoints of a job, oldest first."""
    rows = session.scalars(
        select(CheckpointTable).where(CheckpointTable.job_id == job_id).order_by(CheckpointTable.number)
    )
    return [
        Checkpoint(
            path=row.path,
            epoch=row.epoch,
            step=row.step,
            bytes=row.bytes,
            verdict=row.verdict,
            findings=row.findings,
            level=row.level,
            servers=row.servers or [],
            seconds=row.seconds,
            created_at=row.created_at,
            judged_at=row.judged_at,
            removed_at=row.removed_at,
        )
        for row in rows
    ]
