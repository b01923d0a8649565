"""Retry policy, pause, idempotency key; why each attempt ended."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns; jobs of before get the default policy."""
    with op.batch_alter_table("jobs") as jobs:
        jobs.add_column(sa.Column("policy", sa.JSON(), nullable=False, server_default="{}"))
        jobs.add_column(sa.Column("cancel_checkpoint", sa.Boolean(), nullable=False, server_default="1"))
        jobs.add_column(sa.Column("pause_asked_at", sa.String(length=27), nullable=True))
        jobs.add_column(sa.Column("pause_grace_s", sa.Double(), nullable=True))
        jobs.add_column(sa.Column("idempotency_key", sa.String(length=200), nullable=True))
        jobs.add_column(sa.Column("body_hash", sa.String(length=64), nullable=True))
        jobs.create_index(op.f("ix_jobs_idempotency_key"), ["idempotency_key"])
    with op.batch_alter_table("attempts") as attempts:
        attempts.add_column(sa.Column("stop_for", sa.String(length=40), nullable=True))
        attempts.add_column(sa.Column("retries", sa.Integer(), nullable=False, server_default="0"))
        attempts.add_column(sa.Column("reason", sa.String(length=40), nullable=True))
        attempts.add_column(sa.Column("cause", sa.Text(), nullable=True))


def downgrade() -> None:
    """Drop them."""
    with op.batch_alter_table("attempts") as attempts:
        for name in ("cause", "reason", "retries", "stop_for"):
            attempts.drop_column(name)
    with op.batch_alter_table("jobs") as jobs:
        jobs.drop_index(op.f("ix_jobs_idempotency_key"))
        for name in (
            "body_hash",
            "idempotency_key",
            "pause_grace_s",
            "pause_asked_at",
            "cancel_checkpoint",
            "policy",
        ):
            jobs.drop_column(name)
