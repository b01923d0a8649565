"""From a request to stored jobs: all of a chain or nothing, once for each key.

request -> drafts, checked -> one transaction -> directories
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from pydantic import BaseModel

from eagle3_core.contract.jobdir import is_full
from server.db.queries import jobs as job_queries
from server.domain.ids import new_job_id
from server.domain.job import Job, NewJob, PipelineRef
from server.domain.policy import Policy
from server.errors import InsufficientStorage, KeyReused, RequestInFlight, Unavailable
from server.services.drafts import Draft, Placed, draft_all
from server.services.records import write_new
from server.services.requests import ChainRequest, JobRequest
from server.services.runtime import Runtime
from server.system import clock


def submit(runtime: Runtime, request: JobRequest | ChainRequest, key: str | None = None) -> tuple[list[Job], bool]:
    """Store the jobs of a request, once for each key.

    Returns:
        The jobs, and False when they had been stored before.

    Raises:
        Invalid: with a pointer to each faulty field.
        KeyReused: the key came before with another body.
        RequestInFlight: another request with the key is at work.
        Forbidden: a path lies outside the roots, or a program is not allowed.
        InsufficientStorage: what the jobs would write does not fit.
    """
    return store_once(runtime, request, key, lambda: draft_all(runtime, placed(request)))


def placed(request: JobRequest | ChainRequest) -> list[Placed]:
    """The jobs of a request, each with an id of its own."""
    if isinstance(request, JobRequest):
        return [Placed("", request, new_job_id())]
    return [Placed(f"/jobs/{place}", one, new_job_id()) for place, one in enumerate(request.jobs)]


def store_once(
    runtime: Runtime,
    request: BaseModel,
    key: str | None,
    drafts: Callable[[], Sequence[Draft]],
    pipeline: PipelineRef | None = None,
) -> tuple[list[Job], bool]:
    """The jobs of a request, stored now, and True; or those that were stored with its key before, and False."""
    if key is None:
        return _store(runtime, drafts(), None, pipeline), True
    keyed = _Keyed(key, _hash_of(request))
    with _alone(runtime, key):
        if known := _known(runtime, keyed):
            return known, False
        return _store(runtime, drafts(), keyed, pipeline), True


@dataclass(frozen=True)
class _Keyed:
    """An idempotency key and the hash of the body it came with."""

    key: str
    body_hash: str


def _hash_of(request: BaseModel) -> str:
    """Of what was sent, whatever its spacing and order; fields of later versions do not change it."""
    sent = request.model_dump(mode="json", exclude_unset=True)
    return hashlib.sha256(json.dumps(sent, sort_keys=True).encode()).hexdigest()


@contextmanager
def _alone(runtime: Runtime, key: str) -> Iterator[None]:
    """No other request with this key is at work meanwhile.

    Raises:
        RequestInFlight: one is.
    """
    with runtime.keys_lock:
        if key in runtime.keys_in_flight:
            raise RequestInFlight(f"a request with the Idempotency-Key {key!r} is being carried out; ask again")
        runtime.keys_in_flight.add(key)
    try:
        yield
    finally:
        runtime.keys_in_flight.discard(key)


def _known(runtime: Runtime, keyed: _Keyed) -> list[Job]:
    """The jobs stored with this key.

    Raises:
        KeyReused: they were sent in another body.
    """
    with runtime.database.read() as session:
        jobs = job_queries.jobs_of_key(session, keyed.key)
    if jobs and jobs[0].body_hash != keyed.body_hash:
        raise KeyReused(f"the Idempotency-Key {keyed.key!r} came with another body before; its job is {jobs[0].id}")
    return jobs


def _new_job(draft: Draft, now: datetime, keyed: _Keyed | None, pipeline: PipelineRef | None) -> NewJob:
    request = draft.request
    return NewJob(
        id=draft.id,
        name=draft.name,
        stage=draft.stage,
        params=draft.params.model_dump(mode="json"),
        output_dir=str(draft.output_dir),
        created_at=now,
        depends_on=draft.depends_on,
        priority=request.priority,
        resources=draft.resources,
        labels=request.labels,
        pipeline=pipeline,
        policy=Policy(retry=request.retry, max_seconds=request.max_seconds, on_stall=request.on_stall),
        idempotency_key=None if keyed is None else keyed.key,
        body_hash=None if keyed is None else keyed.body_hash,
    )


def _store(runtime: Runtime, drafts: Sequence[Draft], keyed: _Keyed | None, pipeline: PipelineRef | None) -> list[Job]:
    """Rows and directories or neither: the rows are committed once every directory is there.

    Raises:
        Unavailable: database or directories cannot be written.
    """
    now = clock.utc_now()
    new = [_new_job(draft, now, keyed, pipeline) for draft in drafts]
    try:
        with runtime.database.write() as session:
            job_queries.insert_jobs(session, new)
            jobs = [job for one in new if (job := job_queries.get_job(session, one.id)) is not None]
            for job in jobs:
                write_new(runtime, job)
    except (OSError, Unavailable) as error:
        for one in new:
            shutil.rmtree(runtime.job_dir(one.id).path, ignore_errors=True)
        if isinstance(error, Unavailable):
            raise
        kind = InsufficientStorage if is_full(error) else Unavailable
        raise kind(f"the job directories cannot be written, nothing was stored: {error}") from error
    runtime.wake()
    return jobs
