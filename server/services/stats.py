"""Counts over all jobs, whether the daemon can do its work, and both as Prometheus metrics."""

from datetime import datetime, timedelta

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from pydantic import BaseModel, Field

from server.db.queries import jobs as job_queries
from server.db.queries import listing
from server.domain.states import LIVE_JOB, JobState
from server.errors import Unavailable
from server.services.metrics import list_gpus
from server.services.runtime import Runtime
from server.system import clock, disk


class Stats(BaseModel):
    """All jobs in numbers."""

    jobs: dict[str, int] = Field(description="by state; every state is there")
    queue_length: int
    oldest_queued_s: float | None = Field(description="seconds since the oldest of them was submitted")
    days: float = Field(description="that `ended`, `reasons` and `gpu_hours` are of")
    ended: dict[str, int] = Field(description="jobs that ended in these days, by state")
    reasons: dict[str, int] = Field(description="of these, why they did not succeed")
    gpu_hours: float = Field(description="of attempts in these days: GPUs they held x hours, up to now")


class Readiness(BaseModel):
    """Whether requests can be served: `problems` says why not."""

    ready: bool
    problems: list[str]


def show_stats(runtime: Runtime, days: float) -> Stats:
    """All jobs in numbers, of the last `days`."""
    now = clock.utc_now()
    since = now - timedelta(days=days)
    with runtime.database.read() as session:
        counts = listing.counts_by_state(session)
        oldest = listing.oldest_queued(session)
        used = listing.attempts_with_gpus(session, since)
        return Stats(
            jobs={str(state): counts.get(state, 0) for state in JobState},
            queue_length=counts.get(JobState.QUEUED, 0),
            oldest_queued_s=None if oldest is None else round(max(0.0, (now - oldest).total_seconds()), 1),
            days=days,
            ended=listing.ended_since(session, since),
            reasons=listing.reasons_since(session, since),
            gpu_hours=round(sum(_gpu_hours(*one, since, now) for one in used), 4),
        )


def _gpu_hours(started: datetime, ended: datetime | None, gpus: int, since: datetime, now: datetime) -> float:
    seconds = (min(ended or now, now) - max(started, since)).total_seconds()
    return max(0.0, seconds) * gpus / 3600


def readiness(runtime: Runtime, loop_alive: bool) -> Readiness:
    """Whether the loop turns, the database answers and the state directory has room."""
    problems = [] if loop_alive else ["the loop that watches the jobs has died"]
    try:
        with runtime.database.read() as session:
            listing.counts_by_state(session)
    except Unavailable as error:
        problems.append(error.detail)
    try:
        disk.free_bytes(runtime.settings.state)
        if (low := runtime.space.low(runtime.settings.state)) is not None:
            problems.append(low)
    except OSError as error:
        problems.append(f"{runtime.settings.state} cannot be looked at: {error.strerror}")
    return Readiness(ready=not problems, problems=problems)


def exposition(runtime: Runtime) -> bytes:
    """Jobs, attempts, progress and GPUs in Prometheus' text format, as of now."""
    registry = CollectorRegistry()
    with runtime.database.read() as session:
        counts, reasons = listing.counts_by_state(session), listing.attempt_reasons(session)
        live = [job for job in job_queries.unfinished_jobs(session) if job.state in LIVE_JOB]
    jobs = Gauge("eyas_jobs", "Jobs by state.", ["state"], registry=registry)
    for state in JobState:
        jobs.labels(state).set(counts.get(state, 0))
    ended = Gauge("eyas_attempts_unsuccessful", "Attempts that ended without success.", ["reason"], registry=registry)
    for reason, count in reasons.items():
        ended.labels(reason).set(count)
    progress = {
        name: Gauge(f"eyas_job_{name}", text, ["job", "name", "stage"], registry=registry)
        for name, text in (
            ("step", "Steps done."),
            ("steps", "Steps there will be."),
            ("epoch", "Epoch, counted from 0."),
            ("loss", "Latest loss."),
            ("tokens_per_second", "Latest pace."),
            ("eta_seconds", "Seconds left, as of the last event."),
        )
    }
    for job in live:
        s = job.status
        values = (s.step, s.steps, s.epoch, s.loss, s.tokens_per_s, s.eta_s)
        for gauge, value in zip(progress.values(), values, strict=True):
            if value is not None:
                gauge.labels(job.id, job.name, job.stage).set(value)
    _add_gpus(runtime, registry)
    return generate_latest(registry)


def _add_gpus(runtime: Runtime, registry: CollectorRegistry) -> None:
    names = ["gpu", "uuid"]
    held = Gauge("eyas_gpu_held", "1 while a job holds the GPU.", names, registry=registry)
    gauges = [
        (Gauge("eyas_gpu_utilization_percent", "As NVML says.", names, registry=registry), "utilization_percent"),
        (Gauge("eyas_gpu_memory_used_bytes", "As NVML says.", names, registry=registry), "memory_used"),
        (Gauge("eyas_gpu_memory_total_bytes", "As NVML says.", names, registry=registry), "memory_total"),
        (Gauge("eyas_gpu_power_watts", "As NVML says.", names, registry=registry), "power_w"),
        (Gauge("eyas_gpu_temperature_celsius", "As NVML says.", names, registry=registry), "temperature_c"),
    ]
    for gpu in list_gpus(runtime).gpus:
        place = (gpu.label, gpu.uuid or "")
        held.labels(*place).set(gpu.job is not None)
        values = gpu.model_dump()
        for gauge, field in gauges:
            if values[field] is not None:
                gauge.labels(*place).set(values[field])
