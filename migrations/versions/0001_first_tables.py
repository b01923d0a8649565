"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make them."""
    op.create_table(
        "jobs",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("stage", sa.String(length=40), nullable=False),
        sa.Column("params", sa.JSON(), nullable=False),
        sa.Column("output_dir", sa.Text(), nullable=False),
        sa.Column("created_at", sa.String(length=27), nullable=False),
        sa.Column("state", sa.String(length=20), nullable=False),
        sa.Column("reason", sa.String(length=40), nullable=True),
        sa.Column("cause", sa.Text(), nullable=True),
        sa.Column("hint", sa.Text(), nullable=True),
        sa.Column("health", sa.String(length=20), nullable=True),
        sa.Column("waiting", sa.Text(), nullable=True),
        sa.Column("started_at", sa.String(length=27), nullable=True),
        sa.Column("ended_at", sa.String(length=27), nullable=True),
        sa.Column("cancel_asked_at", sa.String(length=27), nullable=True),
        sa.Column("cancel_grace_s", sa.Double(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_jobs")),
        sa.UniqueConstraint("id", name=op.f("uq_jobs_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_jobs_name"), "jobs", ["name"])
    op.create_index(op.f("ix_jobs_state"), "jobs", ["state"])

    op.create_table(
        "login_sessions",
        sa.Column("key_hash", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.String(length=27), nullable=False),
        sa.Column("expires_at", sa.String(length=27), nullable=False),
        sa.PrimaryKeyConstraint("key_hash", name=op.f("pk_login_sessions")),
    )
    op.create_index(op.f("ix_login_sessions_expires_at"), "login_sessions", ["expires_at"])

    op.create_table(
        "attempts",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=20), nullable=False),
        sa.Column("event_offset", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.String(length=27), nullable=False),
        sa.Column("started_at", sa.String(length=27), nullable=True),
        sa.Column("stop_asked_at", sa.String(length=27), nullable=True),
        sa.Column("ended_at", sa.String(length=27), nullable=True),
        sa.Column("exit_record", sa.JSON(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_attempts_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "number", name=op.f("pk_attempts")),
    )
    op.create_table(
        "checkpoints",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=True),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.Column("bytes", sa.Integer(), nullable=True),
        sa.Column("verdict", sa.String(length=20), nullable=True),
        sa.Column("findings", sa.JSON(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.Column("created_at", sa.String(length=27), nullable=False),
        sa.Column("judged_at", sa.String(length=27), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_checkpoints_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_checkpoints")),
        sa.UniqueConstraint("job_id", "path", name=op.f("uq_checkpoints_job_id_path")),
    )
    op.create_table(
        "events",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("type", sa.String(length=20), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_events_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "seq", name=op.f("pk_events")),
    )
    op.create_table(
        "job_dependencies",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("needs_id", sa.String(length=64), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_job_dependencies_job_id_jobs"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["needs_id"], ["jobs.id"], name=op.f("fk_job_dependencies_needs_id_jobs")),
        sa.PrimaryKeyConstraint("job_id", "needs_id", name=op.f("pk_job_dependencies")),
    )
    op.create_index(op.f("ix_job_dependencies_needs_id"), "job_dependencies", ["needs_id"])


def downgrade() -> None:
    """Drop them."""
    op.drop_index(op.f("ix_job_dependencies_needs_id"), "job_dependencies")

    op.drop_table("job_dependencies")
    op.drop_table("events")
    op.drop_table("checkpoints")
    op.drop_table("attempts")
    op.drop_index(op.f("ix_login_sessions_expires_at"), "login_sessions")

    op.drop_table("login_sessions")
    op.drop_index(op.f("ix_jobs_state"), "jobs")
    op.drop_index(op.f("ix_jobs_name"), "jobs")

    op.drop_table("jobs")
