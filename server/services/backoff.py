"""When a failed attempt is followed by the next one: by boottime, and after a restart by what the wall clock says."""

from collections.abc import Iterable
from datetime import timedelta

from server.domain.job import Job
from server.domain.states import JobState
from server.system import clock


class Backoff:
    """Boottimes at which the next attempts are due."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        self._texts: dict[str, str] = {}

    def begin(self, job: Job) -> None:
        """An attempt has ended just now."""
        if job.attempt is None or job.attempt.reason is None:
            self.forget(job.id)
        else:
            self._set(job, job.policy.retry.backoff_s)

    def forget(self, job_id: str) -> None:
        """Nothing is to be waited for."""
        self._due.pop(job_id, None)
        self._texts.pop(job_id, None)

    def not_due(self, jobs: Iterable[Job]) -> dict[str, str]:
        """Id -> what it waits for, of the queued jobs whose next attempt is not due yet."""
        found = {}
        for job in jobs:
            if job.state != JobState.QUEUED or job.attempt is None or job.attempt.reason is None:
                continue
            if job.retried == job.attempt.number:
                continue
            if job.id not in self._due:
                self._set(job, self._left(job))
            if clock.boottime() < self._due[job.id]:
                found[job.id] = self._texts[job.id]
        return found

    def _left(self, job: Job) -> float:
        """Seconds left as the wall clock has it; a clock that was moved makes it neither negative nor longer."""
        assert job.attempt is not None
        backoff_s = job.policy.retry.backoff_s
        if job.attempt.ended_at is None:
            return backoff_s
        return min(max(0.0, backoff_s - (clock.utc_now() - job.attempt.ended_at).total_seconds()), backoff_s)

    def _set(self, job: Job, seconds: float) -> None:
        assert job.attempt is not None
        self._due[job.id] = clock.boottime() + seconds
        due = (clock.utc_now() + timedelta(seconds=seconds)).strftime("%Y-%m-%d %H:%M:%S UTC")
        number = job.attempt.number
        self._texts[job.id] = (
            f"another attempt is due at {due}, as attempt {number} ended: {job.attempt.reason}: {job.attempt.cause}"
        )
