"""The audit log: rows are added at one end and dropped at the other."""

from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from server.db.models import AuditTable
from server.domain.callers import AuditEntry

REFUSED = (401, 403)

_PRUNE_EVERY = 100


def add(session: Session, entry: AuditEntry, keep: int) -> None:
    """Store an entry; of those beyond `keep` the oldest go.

    Of refused attempts a tenth as many are kept, apart from the others: whoever fails often must not be able to push
    out what succeeded.
    """
    result = session.execute(insert(AuditTable).values(vars(entry)).returning(AuditTable.number))
    if result.scalar_one() % _PRUNE_EVERY == 0:
        refused = AuditTable.status.in_(REFUSED)
        for which, limit in ((~refused, keep), (refused, max(1, keep // 10))):
            beyond = select(AuditTable.number).where(which).order_by(AuditTable.number.desc()).offset(limit).limit(1)
            last = session.scalar(beyond)
            if last is not None:
                session.execute(delete(AuditTable).where(which, AuditTable.number <= last))


def newest(session: Session, before: int | None, limit: int) -> list[tuple[int, AuditEntry]]:
    """Number and entry, newest first, of those with a number under `before`."""
    statement = select(AuditTable).order_by(AuditTable.number.desc()).limit(limit)
    if before is not None:
        statement = statement.where(AuditTable.number < before)
    return [
        (
            row.number,
            AuditEntry(
                time=row.time,
                actor=row.actor,
                via=row.via,
                peer=row.peer,
                method=row.method,
                route=row.route,
                job_id=row.job_id,
                status=row.status,
            ),
        )
        for row in session.scalars(statement)
    ]
