"""Named tokens, which of them a browser session came from, and the audit log."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables; browser sessions of before have ended: nobody knows what token they came from."""
    op.create_table(
        "api_tokens",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("key_hash", sa.String(length=64), nullable=False),
        sa.Column("scope", sa.String(length=10), nullable=False),
        sa.Column("created_at", sa.String(length=27), nullable=False),
        sa.Column("expires_at", sa.String(length=27), nullable=True),
        sa.Column("last_used_at", sa.String(length=27), nullable=True),
        sa.Column("revoked_at", sa.String(length=27), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_api_tokens")),
        sa.UniqueConstraint("key_hash", name=op.f("uq_api_tokens_key_hash")),
    )
    op.create_table(
        "audit_log",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("time", sa.String(length=27), nullable=False),
        sa.Column("actor", sa.String(length=64), nullable=True),
        sa.Column("via", sa.String(length=10), nullable=True),
        sa.Column("peer", sa.String(length=64), nullable=True),
        sa.Column("method", sa.String(length=10), nullable=False),
        sa.Column("route", sa.String(length=200), nullable=True),
        sa.Column("job_id", sa.String(length=64), nullable=True),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_audit_log")),
        sqlite_autoincrement=True,
    )
    op.add_column("login_sessions", sa.Column("token", sa.String(length=64), nullable=True))


def downgrade() -> None:
    """Drop them."""
    op.drop_column("login_sessions", "token")
    op.drop_table("audit_log")
    op.drop_table("api_tokens")
