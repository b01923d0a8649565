"""What happens to queued jobs: which one starts, which one cannot any more, and why the others wait."""

from collections.abc import Sequence
from dataclasses import dataclass

from eagle3_core.contract.exits import Reason
from server.domain.job import Job
from server.domain.outcome import Why
from server.domain.states import LIVE_JOB, JobState


@dataclass(frozen=True)
class Start:
    """Give it a process."""

    job: Job


@dataclass(frozen=True)
class Finish:
    """It ends without having had one."""

    job: Job
    why: Why


@dataclass(frozen=True)
class Wait:
    """It stays, for this reason."""

    job: Job
    waiting: str


Decision = Start | Finish | Wait


def decide(jobs: Sequence[Job], max_running: int) -> list[Decision]:
    """One decision for each queued job, oldest first."""
    running = sum(job.state in LIVE_JOB for job in jobs)
    decisions: list[Decision] = []
    for job in sorted(jobs, key=lambda job: job.number):
        if job.state != JobState.QUEUED:
            continue
        decision = _blocked(job)
        if decision is None and running < max_running:
            decision = Start(job)
            running += 1
        elif decision is None:
            slots = "1 job runs" if max_running == 1 else f"{max_running} jobs run"
            decision = Wait(job, f"{slots} at a time")
        decisions.append(decision)
    return decisions


def _blocked(job: Job) -> Decision | None:
    if job.intents.dependency_failed:
        failed = next(d for d in job.depends_on if d.state in (JobState.FAILED, JobState.CANCELLED))
        ended = f"{failed.state} ({failed.reason})" if failed.reason else str(failed.state)
        return Finish(job, Why(Reason.DEPENDENCY_FAILED, f"{failed.name} ({failed.id}), which it needs, {ended}"))
    if job.intents.cancel:
        return Finish(job, Why(Reason.CANCELLED_BY_USER, "cancelled before it started"))
    open_ones = [d for d in job.depends_on if d.state != JobState.SUCCEEDED]
    if open_ones:
        return Wait(job, "waits for " + ", ".join(d.name for d in open_ones))
    return None
