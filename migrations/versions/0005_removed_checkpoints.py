"""When a checkpoint was removed."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; checkpoints of before were never noted as removed."""
    op.add_column("checkpoints", sa.Column("removed_at", sa.String(length=27), nullable=True))


def downgrade() -> None:
    """Drop it."""
    op.drop_column("checkpoints", "removed_at")
