"""At which version each kind of news last occurred, and which database this is."""

import secrets

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_MARKS = {"progress_version": "1", "change_version": "1", "epoch_version": "0", "checkpoint_version": "0"}
"""Each with its value for a new job."""


def upgrade() -> None:
    """Add the columns, all news of jobs of before being of their present version; give the database a name."""
    for name, first in _MARKS.items():
        op.add_column("jobs", sa.Column(name, sa.Integer(), nullable=False, server_default=first))
        op.execute(f"UPDATE jobs SET {name} = version")  # noqa: S608 - a name of ours
    incarnation = op.create_table(
        "incarnation",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_incarnation")),
    )
    op.bulk_insert(incarnation, [{"id": secrets.token_hex(4)}])


def downgrade() -> None:
    """Drop them."""
    op.drop_table("incarnation")
    for name in reversed(_MARKS):
        op.drop_column("jobs", name)
