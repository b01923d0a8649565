"""record.json and spec.json: the job directory is the truth, so it is written before anybody is answered."""

from datetime import datetime

from eagle3_core.contract.jobdir import JobDir, read_json, write_json
from eagle3_core.contract.params import STAGES
from eagle3_core.contract.spec import JobSpec
from server.db.queries import jobs as job_queries
from server.domain.job import Dependency, Job, PipelineRef
from server.domain.marks import Marks
from server.domain.policy import Policy
from server.domain.resources import Resources
from server.domain.states import JobState
from server.services.runtime import Runtime
from server.system import clock

RECORD_VERSION = 1


class Gone(Exception):
    """The job was deleted meanwhile."""


def write_record(runtime: Runtime, job_id: str) -> Job:
    """Write a job's record from its row as it is now; returns the job.

    The row is read under the lock, so that the last record written is never older than an earlier one.

    Raises:
        Gone: the job was deleted.
    """
    with runtime.record_lock:
        with runtime.database.read() as session:
            job = job_queries.get_job(session, job_id)
        if job is None:
            raise Gone(job_id)
        _write(runtime, job)
    return job


def write_new(runtime: Runtime, job: Job) -> None:
    """Make the directory of a job that nobody else knows yet, with record and spec."""
    _write(runtime, job)
    write_spec(runtime, job)


def _write(runtime: Runtime, job: Job) -> None:
    directory = runtime.job_dir(job.id)
    for path in (directory.path, directory.control, directory.attempts):
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


def read_record(directory: JobDir) -> Job:
    """A job as its record and spec tell it, without its attempts and events; it is queued unless it has ended.

    Raises:
        OSError, ValueError, KeyError, TypeError: a file is missing or damaged.
    """
    record, spec = read_json(directory.record), read_json(directory.spec)
    if record is None or spec is None:
        missing = directory.record if record is None else directory.spec
        raise FileNotFoundError(f"there is no {missing.name}")
    JobSpec.model_validate(spec)
    if record["id"] != directory.path.name:
        raise ValueError(f"{directory.record.name} is of job {record['id']}")

    def time(name: str) -> datetime | None:
        return None if record[name] is None else datetime.fromisoformat(record[name])

    version = int(clock.utc_now().timestamp())  # above any that a client may hold of the row before
    created_at = time("created_at")
    if created_at is None:
        raise ValueError(f"{directory.record.name} has no created_at")
    return Job(
        number=record["number"],
        id=record["id"],
        name=record["name"],
        stage=record["stage"],
        params=spec["params"],
        output_dir=record["output_dir"],
        created_at=created_at,
        state=JobState.QUEUED if record["state"] is None else JobState(record["state"]),
        reason=record["reason"],
        cause=record["cause"],
        hint=record["hint"],
        started_at=time("started_at"),
        ended_at=time("ended_at"),
        cancel_asked_at=time("cancel_asked_at"),
        cancel_grace_s=record["cancel_grace_s"],
        cancel_checkpoint=record["cancel_checkpoint"],
        pause_asked_at=time("pause_asked_at"),
        pause_grace_s=record["pause_grace_s"],
        idempotency_key=record["idempotency_key"],
        body_hash=record["body_hash"],
        policy=Policy.model_validate(record["policy"]),
        priority=record.get("priority", 0),
        resources=Resources.model_validate(record.get("resources", {})),
        labels={str(key): str(value) for key, value in record.get("labels", {}).items()},
        pipeline=PipelineRef(**record["pipeline"]) if record.get("pipeline") else None,
        retried=record.get("retried"),
        version=version,
        marks=Marks.all_at(version),
        depends_on=tuple(Dependency(needed, needed, JobState.QUEUED, None) for needed in record["depends_on"]),
    )


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
        "labels": dict(job.labels),
        "pipeline": None if job.pipeline is None else vars(job.pipeline),
        "retried": job.retried,
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
