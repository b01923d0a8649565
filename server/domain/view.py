"""What clients are shown of a job: the body of GET /jobs/{id} and of GET /jobs."""

from datetime import datetime
from textwrap import shorten
from typing import Any

from pydantic import BaseModel, Field

from eagle3_core.contract.exits import Reason
from server.domain.job import Job, PipelineRef
from server.domain.policy import RetryPolicy
from server.domain.progress import EpochDone, JobResult, JobWarning, LastCheckpoint, SetupFact
from server.domain.resources import GpuRef, Resources
from server.domain.states import FINAL_JOB, JobState

WHY_WIDTH = 160
"""Characters of a verdict's reason in the summary; all of it is in `last_checkpoint`."""


class JobRow(BaseModel):
    """A job in the list."""

    id: str
    name: str
    stage: str
    state: JobState
    reason: str | None = Field(description="why it ended, in one word; null while it lives or when it succeeded")
    cause: str | None = Field(description="why it ended, in one line")
    health: str | None = Field(description="ok, quiet, stalled, unsupervised; null when not running")
    waiting: str | None = Field(description="what a queued job waits for")
    priority: int
    labels: dict[str, str]
    pipeline: PipelineRef | None = Field(description="the pipeline it was submitted with")
    resources: Resources = Field(description="what was asked for; `gpus` is null until the GPUs of the host are known")
    gpus: list[GpuRef] = Field(description="those its latest attempt was given")
    phase: str | None
    epoch: int | None = Field(description="counts from 0, as checkpoint directories do")
    epochs: int | None
    step: int | None
    steps: int | None
    loss: float | None = Field(description="null also when it was not finite")
    eta_s: float | None = Field(description="seconds left, as of the last event")
    elapsed_s: float | None = Field(description="seconds of running, as of the last event")
    last_checkpoint: LastCheckpoint | None
    warnings_total: int
    summary: str
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None


class JobView(JobRow):
    """Everything about one job."""

    hint: str | None = Field(description="what to do about `cause`")
    accuracy: list[float | None] | None = Field(description="of each TTT step")
    lr: float | None
    tokens_per_s: float | None
    unit: str | None = Field(description="what `step` counts")
    epochs_done: list[EpochDone]
    warnings: list[JobWarning]
    warnings_left_out: int = Field(description="warnings beyond the first 100 different ones")
    result: JobResult | None
    setup: list[SetupFact] = Field(description="facts found at the start")
    params: dict[str, Any]
    output_dir: str
    depends_on: list[str]
    retry: RetryPolicy
    max_seconds: float | None = Field(description="one attempt may take")
    on_stall: str = Field(description="report or stop")
    attempt: int | None
    pause_asked_at: datetime | None
    cancel_asked_at: datetime | None
    last_seq: int = Field(description="sequence number of the last event")
    last_event_at: datetime | None
    version: int = Field(description="rises with every change")


class JobList(BaseModel):
    """Jobs, newest first."""

    jobs: list[JobRow]
    next_cursor: str | None = Field(description="send it as `cursor` for older ones; null at the end")


def row_of(job: Job) -> JobRow:
    """A job as the list shows it."""
    return JobRow(**_common(job))


def view_of(job: Job) -> JobView:
    """A job with everything about it."""
    s = job.status
    return JobView(
        **_common(job),
        hint=job.hint,
        accuracy=s.accuracy,
        lr=s.lr,
        tokens_per_s=s.tokens_per_s,
        unit=s.unit,
        epochs_done=s.epochs_done,
        warnings=s.warnings,
        warnings_left_out=s.warnings_left_out,
        result=s.result,
        setup=s.setup,
        params=job.params,
        output_dir=job.output_dir,
        depends_on=[dependency.id for dependency in job.depends_on],
        retry=job.policy.retry,
        max_seconds=job.policy.max_seconds,
        on_stall=job.policy.on_stall,
        attempt=None if job.attempt is None else job.attempt.number,
        pause_asked_at=job.pause_asked_at,
        cancel_asked_at=job.cancel_asked_at,
        last_seq=s.last_seq,
        last_event_at=s.last_event_at,
        version=job.version,
    )


def _common(job: Job) -> dict[str, Any]:
    s = job.status
    return {
        "id": job.id,
        "name": job.name,
        "stage": job.stage,
        "state": job.state,
        "reason": job.reason,
        "cause": job.cause,
        "health": job.health,
        "waiting": job.waiting,
        "priority": job.priority,
        "labels": dict(job.labels),
        "pipeline": job.pipeline,
        "resources": job.resources,
        "gpus": [] if job.attempt is None else list(job.attempt.gpus),
        "phase": s.phase,
        "epoch": s.epoch,
        "epochs": s.epochs,
        "step": s.step,
        "steps": s.steps,
        "loss": s.loss,
        "eta_s": s.eta_s,
        "elapsed_s": s.elapsed_s,
        "last_checkpoint": s.last_checkpoint,
        "warnings_total": sum(warning.count for warning in s.warnings) + s.warnings_left_out,
        "summary": summary_of(job),
        "created_at": job.created_at,
        "started_at": job.started_at,
        "ended_at": job.ended_at,
    }


def summary_of(job: Job) -> str:
    """One line for a person: where the job is, or how it ended. Epochs count from 1 here, as people do."""
    if job.state == JobState.QUEUED:
        return f"queued: {job.waiting}" if job.waiting else "queued"
    parts = [str(job.state)]
    if job.state in FINAL_JOB:
        if job.status.elapsed_s is not None:
            parts[0] += f" after {duration(job.status.elapsed_s)}"
        if job.reason is not None:
            parts[0] += f": {job.reason}: {job.cause}"
    else:
        if job.state == JobState.STOPPING and (job.cancel_asked_at or job.pause_asked_at):
            parts[0] += ", to be cancelled" if job.cancel_asked_at else ", to be paused"
        parts += _where(job)
    return "; ".join(parts + _checkpoint(job))


def _where(job: Job) -> list[str]:
    s = job.status
    parts = []
    if s.phase is not None:
        parts.append(s.phase)
    if s.epoch is not None and s.epochs is not None:
        parts.append(f"epoch {s.epoch + 1} of {s.epochs}")
    if s.step is not None and s.steps:
        parts.append(f"{s.step} of {s.steps} {s.unit or 'steps'} ({100 * s.step // s.steps} %)")
    elif s.step is not None:
        parts.append(f"{s.step} {s.unit or 'steps'}")
    if s.loss is not None:
        parts.append(f"loss {s.loss:.4g}")
    if s.tokens_per_s is not None:
        parts.append(f"{s.tokens_per_s:.0f} tokens/s")
    if s.eta_s is not None and job.state != JobState.STOPPING:
        parts.append(f"about {duration(s.eta_s)} left")
    if job.health not in (None, "ok"):
        parts.append(str(job.health))
    return [", ".join(parts)] if parts else []


def _checkpoint(job: Job) -> list[str]:
    last = job.status.last_checkpoint
    if last is None:
        return []
    text = f"checkpoint {last.path.rstrip('/').rsplit('/', 1)[-1]} {last.verdict or 'not judged yet'}"
    if last.why is not None and job.reason != Reason.INVALID_CHECKPOINT:  # whose cause says it already
        text += f": {shorten(last.why, WHY_WIDTH, placeholder=' …')}"
    return [text]


def duration(seconds: float) -> str:
    """`47 s`, `12 min 3 s`, `3 h 7 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
