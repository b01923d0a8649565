"""Browser sessions."""

from datetime import datetime

from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from server.db.models import LoginSessionTable


def add(session: Session, key_hash: str, token: str, now: datetime, expires_at: datetime) -> None:
    """Store a session that a login link of this token began."""
    values = {"key_hash": key_hash, "token": token, "created_at": now, "expires_at": expires_at}
    session.execute(insert(LoginSessionTable).values(values))


def valid(session: Session, now: datetime) -> dict[str, tuple[datetime, str | None]]:
    """Hash -> (end, token) of every session that has not expired."""
    rows = session.scalars(select(LoginSessionTable).where(LoginSessionTable.expires_at > now))
    return {row.key_hash: (row.expires_at, row.token) for row in rows}


def delete_expired(session: Session, now: datetime) -> None:
    """Forget the sessions that are over."""
    session.execute(delete(LoginSessionTable).where(LoginSessionTable.expires_at <= now))
