"""Browser sessions."""

from datetime import datetime

from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from server.db.models import LoginSessionTable


def add(session: Session, key_hash: str, now: datetime, expires_at: datetime) -> None:
    """Store a session."""
    session.execute(insert(LoginSessionTable).values(key_hash=key_hash, created_at=now, expires_at=expires_at))


def valid(session: Session, now: datetime) -> dict[str, datetime]:
    """Hash -> end of every session that has not expired."""
    rows = session.execute(
        select(LoginSessionTable.key_hash, LoginSessionTable.expires_at).where(LoginSessionTable.expires_at > now)
    )
    return {row.key_hash: row.expires_at for row in rows}


def delete_expired(session: Session, now: datetime) -> None:
    """Forget the sessions that are over."""
    session.execute(delete(LoginSessionTable).where(LoginSessionTable.expires_at <= now))
