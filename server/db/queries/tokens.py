"""Named tokens."""

from datetime import datetime

from sqlalchemy import func, insert, select, update
from sqlalchemy.orm import Session

from server.db.models import TokenTable
from server.domain.callers import Scope, Token


def all_tokens(session: Session) -> list[Token]:
    """Every token, also those revoked or expired, oldest first."""
    rows = session.scalars(select(TokenTable).order_by(TokenTable.created_at, TokenTable.name))
    return [
        Token(
            name=row.name,
            key_hash=row.key_hash,
            scope=Scope(row.scope),
            created_at=row.created_at,
            expires_at=row.expires_at,
            last_used_at=row.last_used_at,
            revoked_at=row.revoked_at,
        )
        for row in rows
    ]


def add(session: Session, token: Token) -> None:
    """Store a new token."""
    session.execute(insert(TokenTable).values(vars(token)))


def revoke(session: Session, name: str, now: datetime) -> None:
    """Note that a token is not to be accepted any more; the first time counts."""
    statement = update(TokenTable).where(TokenTable.name == name, TokenTable.revoked_at.is_(None))
    session.execute(statement.values(revoked_at=now))


def used(session: Session, name: str, now: datetime) -> None:
    """Note that a token was used."""
    later = func.max(func.coalesce(TokenTable.last_used_at, now), now)
    session.execute(update(TokenTable).where(TokenTable.name == name).values(last_used_at=later))
