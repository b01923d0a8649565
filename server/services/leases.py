"""Which attempt holds which GPU.

    begin of an attempt --same transaction--> row in gpu_leases  --before the spawn--> resources.json
    attempt over, and no process with the job's mark left --> the row is deleted

The rows are what the queue goes by; they outlive the daemon. `adopt` makes those anew that a rebuilt database lacks.
"""

import logging
from collections.abc import Iterable, Mapping

from pydantic import ValidationError

from eagle3_core.contract.jobdir import AttemptDir, read_json, write_json
from server.db.queries import jobs as job_queries
from server.db.queries import leases as lease_queries
from server.db.queries.leases import Lease
from server.domain.job import Job
from server.domain.resources import GpuRef
from server.domain.states import LIVE_JOB
from server.services.runtime import Runtime
from server.system import clock, process

logger = logging.getLogger(__name__)

FIRST_AGAIN_S = 0.05
LONGEST_AGAIN_S = 2.0
"""Between two looks for the processes of an attempt that is over; each goes through /proc, so the pause doubles."""


def write_resources(attempt: AttemptDir, gpus: Iterable[GpuRef]) -> None:
    """Write down in the attempt's directory what it holds.

    Raises:
        OSError: the disk is full.
    """
    write_json(attempt.resources, {"gpus": [gpu.model_dump() for gpu in gpus]})


def read_resources(attempt: AttemptDir) -> tuple[GpuRef, ...]:
    """The GPUs an attempt was given by its directory's word; none for a damaged file."""
    try:
        found = read_json(attempt.resources)
        return () if found is None else tuple(GpuRef.model_validate(gpu) for gpu in found["gpus"])
    except (ValueError, KeyError, TypeError, RecursionError, ValidationError):
        logger.error("%s is damaged: it is not known which GPUs the attempt holds", attempt.resources)
        return ()


class Leases:
    """The rows, as the loop knows them; nobody else changes them."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._all: list[Lease] = []
        self._look_again: dict[str, tuple[float, float]] = {}

    def load(self) -> None:
        """Read them."""
        with self._runtime.database.read() as session:
            self._all = lease_queries.every(session)

    @property
    def holders(self) -> Mapping[str, str]:
        """UUID of a GPU -> id of the job that holds it."""
        return {lease.uuid: lease.job_id for lease in self._all}

    def adopt(self, jobs: Iterable[Job]) -> None:
        """At the start of the daemon: a living attempt holds what its directory says, whatever the database lost."""
        live = [(job, job.attempt) for job in jobs if job.state in LIVE_JOB and job.attempt is not None]
        if live:
            with self._runtime.database.write() as session:
                for job, attempt in live:
                    files = self._runtime.job_dir(job.id).attempt(attempt.number)
                    gpus = attempt.gpus or read_resources(files)
                    if gpus and not attempt.gpus:
                        job_queries.note_gpus(session, job.id, attempt.number, gpus)
                    if lease_queries.take(session, job.id, attempt.number, gpus) < len(gpus):
                        logger.error("job %s runs on a GPU that another job holds as well", job.id)
        self.load()

    def ending(self, jobs: Mapping[str, Job]) -> dict[str, str]:
        """Id -> why it cannot have another attempt yet, of jobs whose last one still holds GPUs."""
        text = "processes of its last attempt are still ending"
        return {lease.job_id: text for lease in self._over(jobs) if lease.job_id in jobs}

    def release(self, jobs: Mapping[str, Job]) -> bool:
        """Give back what attempts that are over held, once all their processes are gone; True when that was any.

        Args:
            jobs: those that have not ended, by id.
        """
        free = []
        for job_id, attempt in {(lease.job_id, lease.attempt) for lease in self._over(jobs)}:
            at, pause_s = self._look_again.get(job_id, (0.0, FIRST_AGAIN_S))
            if clock.boottime() < at:
                continue
            if process.any_marked(job_id):
                self._look_again[job_id] = (clock.boottime() + pause_s, min(2 * pause_s, LONGEST_AGAIN_S))
            else:
                free.append((job_id, attempt))
        if free:
            with self._runtime.database.write() as session:
                for job_id, attempt in free:
                    lease_queries.release(session, job_id, attempt)
                    self._look_again.pop(job_id, None)
            self.load()
        return bool(free)

    def _over(self, jobs: Mapping[str, Job]) -> list[Lease]:
        live = {
            (job.id, job.attempt.number) for job in jobs.values() if job.state in LIVE_JOB and job.attempt is not None
        }
        return [lease for lease in self._all if (lease.job_id, lease.attempt) not in live]
