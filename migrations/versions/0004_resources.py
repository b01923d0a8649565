"""What jobs ask of the host, their priority, and the GPUs they hold."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add columns and table; jobs of before ask for what their stage needs."""
    op.add_column("jobs", sa.Column("priority", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("resources", sa.JSON(), nullable=False, server_default="{}"))
    op.add_column("attempts", sa.Column("gpus", sa.JSON(), nullable=False, server_default="[]"))
    op.create_table(
        "gpu_leases",
        sa.Column("uuid", sa.String(length=140), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_gpu_leases_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("uuid", name=op.f("pk_gpu_leases")),
    )
    op.create_index(op.f("ix_gpu_leases_job_id"), "gpu_leases", ["job_id"])


def downgrade() -> None:
    """Drop them."""
    op.drop_table("gpu_leases")
    op.drop_column("attempts", "gpus")
    op.drop_column("jobs", "resources")
    op.drop_column("jobs", "priority")
