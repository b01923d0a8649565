"""Answers of GET /jobs/{id} kept ready as bytes, replaced whenever a job changes."""

import threading
from collections import OrderedDict
from typing import NamedTuple

from server.domain.job import Job
from server.domain.redaction import Redactor
from server.domain.view import view_of

CAPACITY = 4096


class Snapshot(NamedTuple):
    """The serialised view of one job version."""

    version: int
    body: bytes


class Snapshots:
    """The most recently used views, by job id. Safe to use from any thread."""

    def __init__(self, capacity: int = CAPACITY, redactor: Redactor | None = None) -> None:
        self._capacity = capacity
        self._redactor = redactor or Redactor()
        self._lock = threading.Lock()
        self._by_id: OrderedDict[str, Snapshot] = OrderedDict()
        self._deleted: set[str] = set()

    def put(self, job: Job) -> Snapshot:
        """Serialise a job, without secrets; an older version never replaces a newer one."""
        new = Snapshot(job.version, self._redactor.data(view_of(job).model_dump_json().encode()))
        with self._lock:
            if job.id in self._deleted:
                return new  # whoever had loaded it before must not bring it back
            known = self._by_id.get(job.id)
            if known is None or known.version <= new.version:
                self._by_id[job.id] = new
                self._by_id.move_to_end(job.id)
                if len(self._by_id) > self._capacity:
                    self._by_id.popitem(last=False)
            return self._by_id.get(job.id, new)

    def drop(self, job_id: str) -> None:
        """The job was deleted."""
        with self._lock:
            self._deleted.add(job_id)
            self._by_id.pop(job_id, None)

    def get(self, job_id: str) -> Snapshot | None:
        """The view of a job, or None when it has to be loaded."""
        return self._by_id.get(job_id)
