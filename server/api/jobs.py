"""The jobs: submit, list, look at, read on, stop, pause and go on."""

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Header, Query, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from server.api.context import Context, From
from server.api.filters import job_filter
from server.api.problems import Problem
from server.api.routes import KnownQuery
from server.domain.listing import JobFilter
from server.domain.states import JobState
from server.domain.view import JobList, JobView
from server.services import jobs as service
from server.services.dry_run import DryRun, dry_run
from server.services.requests import ChainRequest, JobRequest
from server.services.scopes import refuse_stages
from server.services.stacks import take_stack
from server.services.submission import placed, submit

_PROBLEM = {"model": Problem, "content": {"application/problem+json": {}}}
_KNOWN: dict[int | str, dict[str, Any]] = {401: _PROBLEM, 403: _PROBLEM, 404: _PROBLEM, 422: _PROBLEM}

router = APIRouter(prefix="/jobs", tags=["jobs"], responses=_KNOWN, route_class=KnownQuery)

MAX_OFFSET = 1 << 62


class SubmittedJob(BaseModel):
    """A job that was stored."""

    id: str
    name: str
    state: JobState


class Submitted(BaseModel):
    """The jobs of a request, in its order."""

    jobs: list[SubmittedJob]


class CancelRequest(BaseModel):
    """How to stop a job."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    grace_s: float | None = Field(None, ge=0, le=86_400, description="seconds to put the work down before SIGKILL")
    checkpoint: bool = Field(True, description="a training saves before it stops")


class Cancelled(BaseModel):
    """The job after the request; its end follows."""

    id: str
    state: JobState
    cancel_asked_at: datetime | None


class PauseRequest(BaseModel):
    """How to pause a job."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    grace_s: float | None = Field(None, ge=0, le=86_400, description="seconds to save before SIGKILL")


class Paused(BaseModel):
    """The job after the request; what it asks for follows."""

    id: str
    state: JobState
    pause_asked_at: datetime | None = Field(description="null once it is resumed")


class CheckpointAsked(BaseModel):
    """A request for a checkpoint; the checkpoint follows."""

    id: str
    request: str = Field(description="id of the request")


class CheckpointRow(BaseModel):
    """A checkpoint and what the judge said of it."""

    path: str
    epoch: int | None
    step: int | None
    bytes: int | None
    verdict: str | None = Field(description="valid, suspect, invalid, unreadable; null until judged")
    findings: list[dict[str, Any]]
    seconds: float | None = Field(description="the judging took")
    created_at: datetime
    judged_at: datetime | None
    removed_at: datetime | None = Field(description="when a sound later one made it needless; null while it is there")


class CheckpointList(BaseModel):
    """Oldest first."""

    checkpoints: list[CheckpointRow]


class EventList(BaseModel):
    """Events in order; ask on with `after=next_after`."""

    events: list[dict[str, Any]]
    next_after: int


def _kind_of_body(body: object) -> str:
    if isinstance(body, ChainRequest):
        return "chain"
    return "chain" if isinstance(body, dict) and "jobs" in body else "job"


SubmitBody = Annotated[
    Annotated[JobRequest, Tag("job")] | Annotated[ChainRequest, Tag("chain")], Discriminator(_kind_of_body)
]


IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=200,
        pattern=r"^[\x20-\x7e]+$",
        description="a request that is repeated with its key stores nothing and is answered 200 with the same jobs",
    ),
]


@router.post(
    "",
    status_code=201,
    operation_id="submitJobs",
    response_model=Submitted | DryRun,
    responses={
        201: {"model": Submitted},
        200: {"model": Submitted | DryRun, "description": "stored before with this key; or a dry run"},
        409: _PROBLEM,
        507: _PROBLEM,
    },
)
def post_jobs(
    context: Context,
    caller: From,
    body: Annotated[SubmitBody, Body()],
    response: Response,
    idempotency_key: IdempotencyKey = None,
    dry: Annotated[bool, Query(alias="dry_run", description="store nothing; tell what would be stored")] = False,
) -> Submitted | DryRun:
    """Store one job or a chain of jobs, all or nothing; once for each Idempotency-Key."""
    stages = [(one.pointer, one.request.stage) for one in placed(body)]
    refuse_stages(context.runtime.settings, caller, stages)
    if dry:
        response.status_code = 200
        return dry_run(context.runtime, placed(body))
    jobs, created = submit(context.runtime, body, idempotency_key)
    if not created:
        response.status_code = 200
    response.headers["Location"] = f"/jobs/{jobs[0].id}"
    return Submitted(jobs=[SubmittedJob(id=job.id, name=job.name, state=job.state) for job in jobs])


@router.get("", operation_id="listJobs")
def get_jobs(
    context: Context,
    wanted: Annotated[JobFilter, Depends(job_filter)],
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(max_length=64, description="next_cursor of the page before")] = None,
) -> JobList:
    """Jobs, newest first; jobs that come in meanwhile move no page."""
    return service.list_jobs(context.runtime, limit, wanted, cursor)


@router.get("/{job_id}", operation_id="getJob", response_model=None, responses={200: {"model": JobView}})
async def get_job(context: Context, job_id: str) -> Response:
    """Everything about one job, as of its last event."""
    snapshot = context.runtime.snapshots.get(job_id)
    if snapshot is None:
        snapshot = await run_in_threadpool(service.load_snapshot, context.runtime, job_id)
    return Response(snapshot.body, media_type="application/json")


@router.get(
    "/{job_id}/log",
    operation_id="getLog",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}, "description": "raw bytes; X-Next-Offset is where to read on"}},
)
def get_log(
    context: Context,
    job_id: str,
    offset: Annotated[int, Query(ge=0, le=MAX_OFFSET)] = 0,
    limit: Annotated[int, Query(ge=0, le=8 << 20)] = 65_536,
    attempt: Annotated[int | None, Query(ge=1, le=1_000_000)] = None,
) -> Response:
    """Bytes of the log from an offset; of the newest attempt unless one is named."""
    part = service.read_log(context.runtime, job_id, offset, limit, attempt)
    headers = {
        "X-Next-Offset": str(part.next_offset),
        "X-Log-Size": str(part.size),
        "X-Log-Attempt": str(part.attempt),
        "X-Content-Type-Options": "nosniff",
    }
    return Response(part.data, media_type="text/plain; charset=utf-8", headers=headers)


@router.get("/{job_id}/events", operation_id="getEvents", response_model=None, responses={200: {"model": EventList}})
def get_events(
    context: Context,
    job_id: str,
    after: Annotated[int, Query(ge=0, le=MAX_OFFSET)] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> Response:
    """Events behind a sequence number, oldest first."""
    return Response(service.read_events(context.runtime, job_id, after, limit), media_type="application/json")


@router.post("/{job_id}/cancel", status_code=202, operation_id="cancelJob", responses={200: {"model": Cancelled}})
def post_cancel(
    context: Context, job_id: str, response: Response, body: Annotated[CancelRequest | None, Body()] = None
) -> Cancelled:
    """Have a job stopped: 202 while it lives, 200 when it had ended."""
    asked = body or CancelRequest()
    job, lives = service.ask_cancel(context.runtime, job_id, asked.grace_s, asked.checkpoint)
    if not lives:
        response.status_code = 200
    return Cancelled(id=job.id, state=job.state, cancel_asked_at=job.cancel_asked_at)


@router.post("/{job_id}/pause", status_code=202, operation_id="pauseJob", responses={409: _PROBLEM})
def post_pause(context: Context, job_id: str, body: Annotated[PauseRequest | None, Body()] = None) -> Paused:
    """Have a job stopped, a training with a checkpoint, until it is resumed; one that is queued is held."""
    job = service.ask_pause(context.runtime, job_id, None if body is None else body.grace_s)
    return Paused(id=job.id, state=job.state, pause_asked_at=job.pause_asked_at)


@router.post("/{job_id}/resume", status_code=202, operation_id="resumeJob", responses={409: _PROBLEM})
def post_resume(context: Context, job_id: str) -> Paused:
    """Have a paused job go on, with another attempt, through the queue."""
    job = service.ask_resume(context.runtime, job_id)
    return Paused(id=job.id, state=job.state, pause_asked_at=job.pause_asked_at)


@router.post("/{job_id}/checkpoint", status_code=202, operation_id="checkpointJob", responses={409: _PROBLEM})
def post_checkpoint(context: Context, job_id: str) -> CheckpointAsked:
    """Have a running training save and judge a checkpoint at its next step."""
    return CheckpointAsked(id=job_id, request=service.ask_checkpoint(context.runtime, job_id))


@router.get(
    "/{job_id}/stack",
    operation_id="getStack",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}, "description": "as of now"}, 409: _PROBLEM, 503: _PROBLEM},
)
def get_stack(context: Context, job_id: str) -> Response:
    """Stacks of every thread of a running job's processes, data loader workers included; takes up to 5 s."""
    return Response(take_stack(context.runtime, job_id), media_type="text/plain; charset=utf-8")


@router.get("/{job_id}/checkpoints", operation_id="listCheckpoints")
def get_checkpoints(context: Context, job_id: str) -> CheckpointList:
    """Checkpoints of a job with their verdicts, oldest first."""
    found = service.list_checkpoints(context.runtime, job_id)
    return CheckpointList(checkpoints=[CheckpointRow.model_validate(vars(one)) for one in found])
