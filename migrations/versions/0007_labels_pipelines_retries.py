"""Labels, pipelines, and attempts asked for after the end; what the list is filtered by is indexed."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them; jobs of before have none."""
    op.add_column("jobs", sa.Column("pipeline_id", sa.String(length=64), nullable=True))
    op.add_column("jobs", sa.Column("pipeline_name", sa.String(length=200), nullable=True))
    op.add_column("jobs", sa.Column("retried", sa.Integer(), nullable=True))
    op.create_index("ix_jobs_pipeline_id", "jobs", ["pipeline_id"])
    op.create_index("ix_jobs_stage", "jobs", ["stage"])
    op.create_index("ix_jobs_created_at", "jobs", ["created_at"])
    op.create_table(
        "job_labels",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(length=63), nullable=False),
        sa.Column("value", sa.String(length=200), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_job_labels_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "key", name=op.f("pk_job_labels")),
    )
    op.create_index("ix_job_labels_key_value", "job_labels", ["key", "value"])


def downgrade() -> None:
    """Drop them."""
    op.drop_table("job_labels")
    for column in ("created_at", "stage", "pipeline_id"):
        op.drop_index(f"ix_jobs_{column}", "jobs")
    for column in ("retried", "pipeline_name", "pipeline_id"):
        op.drop_column("jobs", column)
