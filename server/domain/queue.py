"""What happens to queued jobs: which one starts, which one cannot any more, and why the others wait."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eagle3_core.contract.exits import Reason
from server.domain.job import Job
from server.domain.outcome import Why
from server.domain.states import LIVE_JOB, WAITING_JOB, JobState


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


@dataclass(frozen=True)
class Hold:
    """It is paused."""

    job: Job


SLOTLESS = frozenset({"adopt"})
"""Stages that only watch: they take no slot and wait for none."""

Decision = Start | Finish | Wait | Hold


def decide(jobs: Sequence[Job], max_running: int, not_due: Mapping[str, str] | None = None) -> list[Decision]:
    """One decision for each queued or paused job, oldest first. `not_due`: id -> what its next attempt waits for."""
    running = sum(job.state in LIVE_JOB and job.stage not in SLOTLESS for job in jobs)
    decisions: list[Decision] = []
    for job in sorted(jobs, key=lambda job: job.number):
        if job.state not in WAITING_JOB:
            continue
        decision = _blocked(job, not_due or {})
        if decision is None and job.stage in SLOTLESS:
            decision = Start(job)
        elif decision is None and running < max_running:
            decision = Start(job)
            running += 1
        elif decision is None:
            slots = "1 job runs" if max_running == 1 else f"{max_running} jobs run"
            decision = Wait(job, f"{slots} at a time")
        decisions.append(decision)
    return decisions


def _blocked(job: Job, not_due: Mapping[str, str]) -> Decision | None:
    if job.intents.dependency_failed:
        failed = next(d for d in job.depends_on if d.state in (JobState.FAILED, JobState.CANCELLED))
        ended = f"{failed.state} ({failed.reason})" if failed.reason else str(failed.state)
        return Finish(job, Why(Reason.DEPENDENCY_FAILED, f"{failed.name} ({failed.id}), which it needs, {ended}"))
    if job.intents.cancel:
        when = "before it started" if job.attempt is None else "before its next attempt"
        return Finish(job, Why(Reason.CANCELLED_BY_USER, f"cancelled {when}"))
    if job.intents.pause:
        return Hold(job)
    open_ones = [d for d in job.depends_on if d.state != JobState.SUCCEEDED]
    if open_ones:
        return Wait(job, "waits for " + ", ".join(d.name for d in open_ones))
    return Wait(job, not_due[job.id]) if job.id in not_due else None
