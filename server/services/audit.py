"""The audit log: who wrote what, and who was refused. Never what was sent."""

from functools import partial

from server.db.queries import audit as audit_queries
from server.domain.callers import LOCAL, AuditEntry, Caller, Scope
from server.services.runtime import Runtime
from server.system import clock

_LOCAL = Caller(LOCAL, Scope.ADMIN, "local")


def note(
    runtime: Runtime,
    caller: Caller | None,
    peer: str | None,
    method: str,
    route: str | None,
    job_id: str | None,
    status: int,
) -> None:
    """Have an entry stored. Nothing waits for it: a full disk must not stop a cancel."""
    entry = AuditEntry(
        time=clock.utc_now(),
        actor=None if caller is None else caller.name,
        via=None if caller is None else caller.via,
        peer=peer,
        method=method,
        route=route,
        job_id=job_id,
        status=status,
    )
    runtime.background.put(partial(audit_queries.add, entry=entry, keep=runtime.settings.audit_rows))


def note_local_cancel(runtime: Runtime, job_id: str) -> None:
    """Have it stored that somebody on this host put a cancel into a job's directory."""
    note(runtime, _LOCAL, None, "POST", "/jobs/{job_id}/cancel", job_id, 202)


def read(runtime: Runtime, before: int | None, limit: int) -> tuple[list[AuditEntry], int | None]:
    """Entries, newest first, and where to read on; None at the end."""
    runtime.background.try_flush()
    with runtime.database.read() as session:
        found = audit_queries.newest(session, before, limit)
    return [entry for _, entry in found], found[-1][0] if len(found) == limit else None
