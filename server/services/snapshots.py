"""Answers of GET /jobs/{id} kept ready as bytes, replaced whenever a job changes; who waits for it is told."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from server.domain.job import Job
from server.domain.marks import Marks
from server.domain.redaction import Redactor
from server.domain.states import FINAL_JOB, LIVE_ATTEMPT
from server.domain.view import view_of

CAPACITY = 4096


class Snapshot(NamedTuple):
    """The serialised view of one job version, and what those who wait or follow need to know of it.

    Attributes:
        ended: the job has; nothing will change any more.
        attempt: number of the latest process life; 0 before the first.
        live: that has not ended; its log may grow.
        last_seq: of its last event.
    """

    version: int
    marks: Marks
    state: str
    ended: bool
    attempt: int
    live: bool
    last_seq: int
    body: bytes


class Snapshots:
    """The most recently used views, by job id. Safe to use from any thread."""

    def __init__(
        self,
        capacity: int = CAPACITY,
        redactor: Redactor | None = None,
        tell: Callable[[str], None] = lambda _job_id: None,
    ) -> None:
        """`tell` is called with the id of each job that has changed, once its new view can be had, or was deleted."""
        self._capacity = capacity
        self._redactor = redactor or Redactor()
        self._tell = tell
        self._lock = threading.Lock()
        self._by_id: OrderedDict[str, Snapshot] = OrderedDict()
        self._deleted: set[str] = set()

    def put(self, job: Job) -> Snapshot:
        """Serialise a job, without secrets; an older version never replaces a newer one."""
        new = self._of(job)
        with self._lock:
            if job.id in self._deleted:
                return new  # whoever had loaded it before must not bring it back
            known = self._by_id.get(job.id)
            if known is not None and known.version > new.version:
                return known
            self._by_id[job.id] = new
            self._by_id.move_to_end(job.id)
            if len(self._by_id) > self._capacity:
                self._by_id.popitem(last=False)
        if known is None or known.version < new.version:
            self._tell(job.id)
        return new

    def drop(self, job_id: str) -> None:
        """The job was deleted."""
        with self._lock:
            self._deleted.add(job_id)
            self._by_id.pop(job_id, None)
        self._tell(job_id)

    def get(self, job_id: str) -> Snapshot | None:
        """The view of a job, or None when it has to be loaded."""
        return self._by_id.get(job_id)

    def _of(self, job: Job) -> Snapshot:
        return Snapshot(
            version=job.version,
            marks=job.marks,
            state=job.state,
            ended=job.state in FINAL_JOB,
            attempt=0 if job.attempt is None else job.attempt.number,
            live=job.attempt is not None and job.attempt.state in LIVE_ATTEMPT,
            last_seq=job.status.last_seq,
            body=self._redactor.data(view_of(job).model_dump_json().encode()),
        )
