"""How closely a checkpoint was judged, and what each server would do with it."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns; of verdicts of before neither was kept."""
    op.add_column("checkpoints", sa.Column("level", sa.String(length=10), nullable=True))
    op.add_column("checkpoints", sa.Column("servers", sa.JSON(), nullable=True))


def downgrade() -> None:
    """Drop them."""
    op.drop_column("checkpoints", "servers")
    op.drop_column("checkpoints", "level")
