"""record.json and spec.json: the job directory is the truth, so it is written before anybody is answered."""

from eagle3_core.contract.jobdir import read_json, write_json
from eagle3_core.contract.params import STAGES
from eagle3_core.contract.spec import JobSpec
from server.db.queries import jobs as job_queries
from server.domain.job import Job
from server.services.runtime import Runtime

RECORD_VERSION = 1


def write_record(runtime: Runtime, job_id: str) -> Job:
    """Write a job's record from its row as it is now; returns the job.

    The row is read under the lock, so that the last record written is never older than an earlier one.
    """
    with runtime.record_lock:
        with runtime.database.read() as session:
            job = job_queries.get_job(session, job_id)
        assert job is not None
        _write(runtime, job)
    return job


def write_new(runtime: Runtime, job: Job) -> None:
    """Make the directory of a job that nobody else knows yet, with record and spec."""
    _write(runtime, job)
    write_spec(runtime, job)


def _write(runtime: Runtime, job: Job) -> None:
    directory = runtime.job_dir(job.id)
    for path in (directory.path, directory.control, directory.path / "attempts"):
        path.mkdir(parents=True, exist_ok=True)
    record = _record_of(job)
    try:
        same = read_json(directory.record) == record
    except (ValueError, RecursionError):
        same = False  # damaged: it is made anew
    if not same:
        write_json(directory.record, record)


def write_spec(runtime: Runtime, job: Job) -> None:
    """Write what the stage works from, once; it is never rewritten.

    Under the lock, as the loop may start a job while the request that stored it is still being answered.
    """
    path = runtime.job_dir(job.id).spec
    with runtime.record_lock:
        if path.exists():
            return
        params = STAGES[job.stage].model_validate(job.params)
        spec = JobSpec(job_id=job.id, name=job.name, stage=job.stage, params=params)
        write_json(path, spec.model_dump(mode="json"))


def _record_of(job: Job) -> dict[str, object]:
    def text(value: object) -> str | None:
        return None if value is None else str(value)

    return {
        "schema_version": RECORD_VERSION,
        "number": job.number,
        "id": job.id,
        "name": job.name,
        "stage": job.stage,
        "output_dir": job.output_dir,
        "depends_on": [dependency.id for dependency in job.depends_on],
        "policy": job.policy.model_dump(mode="json"),
        "priority": job.priority,
        "resources": job.resources.model_dump(mode="json"),
        "idempotency_key": job.idempotency_key,
        "body_hash": job.body_hash,
        "created_at": text(job.created_at),
        "cancel_asked_at": text(job.cancel_asked_at),
        "cancel_grace_s": job.cancel_grace_s,
        "cancel_checkpoint": job.cancel_checkpoint,
        "pause_asked_at": text(job.pause_asked_at),
        "pause_grace_s": job.pause_grace_s,
        "state": str(job.state) if job.ended_at is not None else None,
        "reason": job.reason,
        "cause": job.cause,
        "hint": job.hint,
        "started_at": text(job.started_at),
        "ended_at": text(job.ended_at),
    }
