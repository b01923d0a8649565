"""Jobs and attempts as the daemon handles them, free of the database."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from server.domain.marks import FIRST, Marks
from server.domain.policy import NO_RETRY, Policy
from server.domain.progress import Status
from server.domain.resources import BY_STAGE, GpuRef, Resources
from server.domain.states import AttemptState, Intents, JobState, job_state

CANCEL = "cancel"
PAUSE = "pause"


@dataclass(frozen=True)
class Attempt:
    """One process life.

    Attributes:
        event_offset: byte of its events.jsonl up to which its events are stored.
        stop_for: who had it stopped first: `cancel`, `pause`, or the reason of a stop by policy.
        retries: attempts before it that the retry policy gave; those after a pause are not counted.
        reason, cause: why it ended without success, or was stopped.
        gpus: those it was given.
    """

    number: int
    state: AttemptState
    event_offset: int = 0
    started_at: datetime | None = None
    stop_asked_at: datetime | None = None
    stop_for: str | None = None
    retries: int = 0
    reason: str | None = None
    cause: str | None = None
    ended_at: datetime | None = None
    gpus: tuple[GpuRef, ...] = ()


@dataclass(frozen=True)
class Dependency:
    """A job this one waits for."""

    id: str
    name: str
    state: JobState
    reason: str | None


@dataclass(frozen=True)
class PipelineRef:
    """The pipeline a job was submitted with."""

    id: str
    name: str


@dataclass(frozen=True)
class Job:
    """A job with its latest attempt. `retried`: the number of the attempt whose end somebody overruled."""

    number: int
    id: str
    name: str
    stage: str
    params: dict[str, Any]
    output_dir: str
    created_at: datetime
    state: JobState = JobState.QUEUED
    reason: str | None = None
    cause: str | None = None
    hint: str | None = None
    health: str | None = None
    waiting: str | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    cancel_asked_at: datetime | None = None
    cancel_grace_s: float | None = None
    cancel_checkpoint: bool = True
    pause_asked_at: datetime | None = None
    pause_grace_s: float | None = None
    idempotency_key: str | None = None
    body_hash: str | None = None
    policy: Policy = NO_RETRY
    priority: int = 0
    resources: Resources = BY_STAGE
    labels: Mapping[str, str] = field(default_factory=dict)
    pipeline: PipelineRef | None = None
    retried: int | None = None
    version: int = 1
    marks: Marks = FIRST
    status: Status = field(default_factory=Status)
    depends_on: tuple[Dependency, ...] = ()
    attempt: Attempt | None = None

    @property
    def intents(self) -> Intents:
        """What was decided about the job."""
        failed = any(d.state in (JobState.FAILED, JobState.CANCELLED) for d in self.depends_on)
        return Intents(
            cancel=self.cancel_asked_at is not None, dependency_failed=failed, pause=self.pause_asked_at is not None
        )

    @property
    def another_follows(self) -> bool:
        """Whether the last attempt, once it has ended without success, is followed by another one."""
        if self.attempt is None:
            return False
        paused = self.attempt.state == AttemptState.STOPPED and self.attempt.stop_for == PAUSE
        asked = self.retried == self.attempt.number
        return paused or asked or self.policy.retry.grants(self.attempt.reason, self.attempt.retries)

    @property
    def retries(self) -> int:
        """Of the next attempt: those before it that the policy gave since somebody last asked for one."""
        last = self.attempt
        if last is None or self.retried == last.number:
            return 0
        return last.retries + (last.reason is not None)

    @property
    def derived_state(self) -> JobState:
        """The state that follows from intents, attempts and policy."""
        attempts = [] if self.attempt is None else [self.attempt.state]
        return job_state(self.intents, attempts, self.another_follows)


@dataclass(frozen=True)
class NewJob:
    """A job about to be stored; `depends_on` holds ids."""

    id: str
    name: str
    stage: str
    params: dict[str, Any]
    output_dir: str
    created_at: datetime
    depends_on: tuple[str, ...] = ()
    policy: Policy = NO_RETRY
    priority: int = 0
    resources: Resources = BY_STAGE
    labels: Mapping[str, str] = field(default_factory=dict)
    pipeline: PipelineRef | None = None
    idempotency_key: str | None = None
    body_hash: str | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint a job wrote or judged."""

    path: str
    epoch: int | None
    step: int | None
    bytes: int | None
    verdict: str | None
    findings: list[dict[str, Any]]
    level: str | None
    servers: list[dict[str, Any]]
    seconds: float | None
    created_at: datetime
    judged_at: datetime | None
    removed_at: datetime | None
