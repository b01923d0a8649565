"""Tables. The job directories are the truth; these are an index of them, save those of access.

jobs 1--n job_dependencies      what a job waits for
     1--n job_labels            what its owner calls it by
     1--n attempts              process lives; `event_offset` = byte of events.jsonl read so far
     1--n gpu_leases            GPUs that are held; each by one attempt, until all its processes are gone
     1--n events                one row a line of events.jsonl
     1--n checkpoints           with their verdicts
login_sessions                  browser sessions, by hash
api_tokens                      bearer tokens besides the owner's, by hash
audit_log                       writes and refused attempts
incarnation                     one row: which database this is, so that what clients hold of another one is recognised
"""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, Double, ForeignKey, Index, MetaData, String, Text, TypeDecorator, UniqueConstraint
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


class UtcDateTime(TypeDecorator[datetime]):
    """An aware UTC time as fixed-width text, which sorts by time. SQLite's own type drops the zone."""

    impl = String(27)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> str | None:
        """Aware time to text."""
        if value is None:
            return None
        assert value.tzinfo is not None
        return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    def process_result_value(self, value: str | None, dialect: Dialect) -> datetime | None:
        """Text to aware time."""
        return None if value is None else datetime.fromisoformat(value)


class Base(DeclarativeBase):
    """Base of all tables."""

    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {  # noqa: RUF012
        datetime: UtcDateTime,
        float: Double,
        dict[str, Any]: JSON,
        list[dict[str, Any]]: JSON,
    }


class JobTable(Base):
    """What was asked, what was decided about it, and what came of it."""

    __tablename__ = "jobs"
    __table_args__ = (
        *(Index(None, name) for name in ("state", "name", "stage", "created_at", "pipeline_id")),
        {"sqlite_autoincrement": True},
    )

    number: Mapped[int] = mapped_column(primary_key=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    name: Mapped[str] = mapped_column(String(200))
    stage: Mapped[str] = mapped_column(String(40))
    params: Mapped[dict[str, Any]]
    output_dir: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime]
    state: Mapped[str] = mapped_column(String(20))
    reason: Mapped[str | None] = mapped_column(String(40))
    cause: Mapped[str | None] = mapped_column(Text)
    hint: Mapped[str | None] = mapped_column(Text)
    health: Mapped[str | None] = mapped_column(String(20))
    waiting: Mapped[str | None] = mapped_column(Text)
    started_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    cancel_asked_at: Mapped[datetime | None]
    cancel_grace_s: Mapped[float | None]
    cancel_checkpoint: Mapped[bool] = mapped_column(server_default="1")
    pause_asked_at: Mapped[datetime | None]
    pause_grace_s: Mapped[float | None]
    idempotency_key: Mapped[str | None] = mapped_column(String(200), index=True)
    body_hash: Mapped[str | None] = mapped_column(String(64))
    policy: Mapped[dict[str, Any]] = mapped_column(server_default="{}")
    priority: Mapped[int] = mapped_column(server_default="0")
    resources: Mapped[dict[str, Any]] = mapped_column(server_default="{}")
    pipeline_id: Mapped[str | None] = mapped_column(String(64))
    pipeline_name: Mapped[str | None] = mapped_column(String(200))
    retried: Mapped[int | None]
    status: Mapped[str] = mapped_column(Text)
    version: Mapped[int]
    progress_version: Mapped[int] = mapped_column(server_default="1")
    change_version: Mapped[int] = mapped_column(server_default="1")
    epoch_version: Mapped[int] = mapped_column(server_default="0")
    checkpoint_version: Mapped[int] = mapped_column(server_default="0")


class DependencyTable(Base):
    """`job_id` waits for `needs_id`."""

    __tablename__ = "job_dependencies"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    needs_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True, index=True)
    position: Mapped[int]


class LabelTable(Base):
    """One label of a job."""

    __tablename__ = "job_labels"
    __table_args__ = (Index(None, "key", "value"),)

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    key: Mapped[str] = mapped_column(String(63), primary_key=True)
    value: Mapped[str] = mapped_column(String(200))


class AttemptTable(Base):
    """One process life."""

    __tablename__ = "attempts"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(String(20))
    event_offset: Mapped[int]
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    stop_asked_at: Mapped[datetime | None]
    stop_for: Mapped[str | None] = mapped_column(String(40))
    retries: Mapped[int] = mapped_column(server_default="0")
    reason: Mapped[str | None] = mapped_column(String(40))
    cause: Mapped[str | None] = mapped_column(Text)
    ended_at: Mapped[datetime | None]
    exit_record: Mapped[dict[str, Any] | None]
    gpus: Mapped[list[dict[str, Any]]] = mapped_column(server_default="[]")


class GpuLeaseTable(Base):
    """A GPU that is held. The key is what keeps it from being handed out twice."""

    __tablename__ = "gpu_leases"

    uuid: Mapped[str] = mapped_column(String(140), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), index=True)
    attempt: Mapped[int]


class EventTable(Base):
    """One line of events.jsonl."""

    __tablename__ = "events"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True)
    attempt: Mapped[int]
    type: Mapped[str] = mapped_column(String(20))
    body: Mapped[str] = mapped_column(Text)


class CheckpointTable(Base):
    """A checkpoint a job wrote or judged."""

    __tablename__ = "checkpoints"
    __table_args__ = (UniqueConstraint("job_id", "path"),)

    number: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    path: Mapped[str] = mapped_column(Text)
    epoch: Mapped[int | None]
    step: Mapped[int | None]
    bytes: Mapped[int | None]
    verdict: Mapped[str | None] = mapped_column(String(20))
    findings: Mapped[list[dict[str, Any]]]
    level: Mapped[str | None] = mapped_column(String(10))
    servers: Mapped[list[dict[str, Any]] | None]
    seconds: Mapped[float | None]
    created_at: Mapped[datetime]
    judged_at: Mapped[datetime | None]
    removed_at: Mapped[datetime | None]


class LoginSessionTable(Base):
    """A browser that came with a login link. Only a hash of its cookie is kept."""

    __tablename__ = "login_sessions"

    key_hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime] = mapped_column(index=True)
    token: Mapped[str | None] = mapped_column(String(64))  # None: of before tokens had names; such a session has ended


class TokenTable(Base):
    """A named bearer token. Only its hash is kept; a revoked one stays, so that the audit log can be read."""

    __tablename__ = "api_tokens"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    key_hash: Mapped[str] = mapped_column(String(64), unique=True)
    scope: Mapped[str] = mapped_column(String(10))
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class AuditTable(Base):
    """One write or refused attempt; rows are added and, beyond the limit, dropped from the old end, never changed."""

    __tablename__ = "audit_log"
    __table_args__ = ({"sqlite_autoincrement": True},)

    number: Mapped[int] = mapped_column(primary_key=True)
    time: Mapped[datetime]
    actor: Mapped[str | None] = mapped_column(String(64))
    via: Mapped[str | None] = mapped_column(String(10))
    peer: Mapped[str | None] = mapped_column(String(64))
    method: Mapped[str] = mapped_column(String(10))
    route: Mapped[str | None] = mapped_column(String(200))
    job_id: Mapped[str | None] = mapped_column(String(64))
    status: Mapped[int]


class IncarnationTable(Base):
    """Which database this is: made anew, or a backup that was put back, it is another one."""

    __tablename__ = "incarnation"

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
