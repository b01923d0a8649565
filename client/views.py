"""What the daemon answers, typed; docs/api.md has the fields."""

from typing import Any, NamedTuple, TypedDict

ENDED = frozenset({"succeeded", "failed", "cancelled"})


class SubmittedJob(TypedDict):
    """A job that was stored."""

    id: str
    name: str
    state: str


class LastCheckpoint(TypedDict):
    """The newest checkpoint of a job."""

    path: str
    verdict: str | None
    why: str | None


class JobRow(TypedDict):
    """A job in the list; see docs/api.md for the fields."""

    id: str
    name: str
    stage: str
    state: str
    reason: str | None
    cause: str | None
    health: str | None
    waiting: str | None
    priority: int
    labels: dict[str, str]
    pipeline: dict[str, str] | None
    resources: dict[str, Any]
    gpus: list[dict[str, Any]]
    phase: str | None
    epoch: int | None
    epochs: int | None
    step: int | None
    steps: int | None
    loss: float | None
    eta_s: float | None
    elapsed_s: float | None
    last_checkpoint: LastCheckpoint | None
    warnings_total: int
    summary: str
    created_at: str
    started_at: str | None
    ended_at: str | None


class JobView(JobRow):
    """Everything about one job; see docs/api.md for the fields."""

    hint: str | None
    accuracy: list[float | None] | None
    lr: float | None
    tokens_per_s: float | None
    unit: str | None
    epochs_done: list[dict[str, Any]]
    warnings: list[dict[str, Any]]
    warnings_left_out: int
    result: dict[str, Any] | None
    setup: list[dict[str, Any]]
    params: dict[str, Any]
    output_dir: str
    depends_on: list[str]
    retry: dict[str, Any]
    max_seconds: float | None
    on_stall: str
    attempt: int | None
    pause_asked_at: str | None
    cancel_asked_at: str | None
    last_seq: int
    last_event_at: str | None
    version: int


class JobPage(TypedDict):
    """A page of the list."""

    jobs: list[JobRow]
    next_cursor: str | None


class AttemptRow(TypedDict):
    """One process life; see docs/api.md for the fields."""

    number: int
    state: str
    reason: str | None
    cause: str | None
    stop_for: str | None
    created_at: str
    started_at: str | None
    stop_asked_at: str | None
    ended_at: str | None
    gpus: list[dict[str, Any]]
    exit: dict[str, Any] | None
    log_bytes: int | None


class Removal(TypedDict):
    """What deleting a job removes, or has removed."""

    id: str
    deleted: bool
    paths: list[str]
    kept: list[str]
    bytes: int
    confirm: str | None


class Pipeline(TypedDict):
    """A pipeline; its state follows from its jobs."""

    id: str
    name: str
    state: str
    jobs_total: int
    jobs_done: int
    summary: str
    created_at: str
    started_at: str | None
    ended_at: str | None
    jobs: list[JobRow]


class LogPart(NamedTuple):
    """Bytes of a log and where to read on."""

    data: bytes
    next_offset: int
    size: int
    attempt: int
    complete: bool


class Waited(NamedTuple):
    """A job and why the wait for it is over: `met`, `ended` or `timeout`."""

    job: JobView
    outcome: str
