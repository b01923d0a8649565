"""Which database this is."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from server.db.models import IncarnationTable


def read(session: Session) -> str:
    """Eight digits that another database does not have."""
    return session.execute(select(IncarnationTable.id)).scalar_one()
