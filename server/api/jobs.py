"""The jobs: submit, list, look at, read on, stop, pause and go on."""

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Header, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from server.api.context import Context, From
from server.api.filters import job_filter
from server.api.problems import Problem
from server.api.routes import Direct, KnownQuery
from server.api.waiting import UntilParam, Wait, ask_of, conditional, tags_of, unless_gone, version_known, waited
from server.domain.listing import ALL_JOBS, JobFilter
from server.domain.marks import Standing, Until
from server.domain.states import JobState
from server.domain.view import JobList, JobView, row_of
from server.errors import FieldError, Invalid
from server.services import jobs as service
from server.services.dry_run import DryRun, dry_run
from server.services.requests import ChainRequest, JobRequest
from server.services.scopes import refuse_stages
from server.services.stacks import take_stack
from server.services.submission import placed, submit
from server.services.waiting import hold, hold_list, list_state, refuse_unknown, snapshot_of

PROBLEM = {"model": Problem, "content": {"application/problem+json": {}}}
KNOWN_PROBLEMS: dict[int | str, dict[str, Any]] = {401: PROBLEM, 403: PROBLEM, 404: PROBLEM, 422: PROBLEM}

router = APIRouter(prefix="/jobs", tags=["jobs"], responses=KNOWN_PROBLEMS, route_class=KnownQuery)

MAX_OFFSET = 1 << 62
MAX_IDS = 100


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
    level: str | None = Field(description="quick, full or deep: how closely it was judged")
    servers: list[dict[str, Any]] = Field(
        description="what each server would do with it: loads, loads_wrongly or refuses, and the rules that say so"
    )
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
        409: PROBLEM,
        507: PROBLEM,
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


@router.get(
    "", operation_id="listJobs", response_model=None, responses={200: {"model": JobList}, 304: {}, 503: PROBLEM}
)
async def get_jobs(
    context: Context,
    request: Request,
    wanted: Annotated[JobFilter, Depends(job_filter)],
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(max_length=64, description="next_cursor of the page before")] = None,
    ids: Annotated[
        str | None, Query(max_length=7000, description="these jobs only, comma between them, 100 at most")
    ] = None,
    wait: Wait = None,
    until: UntilParam = Until.CHANGE,
    known: Annotated[
        str | None, Query(max_length=100, description="the ETag of an earlier answer, where no header can be sent")
    ] = None,
) -> Response:
    """Jobs, newest first, or those named; jobs that come in meanwhile move no page.

    With `wait`, once there is news of any of the newest, or of those named.
    """
    named = _ids_in(ids, until, wait is not None)
    if (named or wait is not None) and (wanted != ALL_JOBS or cursor is not None):
        text = "filters and cursors go with neither ids nor wait; name the jobs to wait for with ids"
        raise Invalid.of([FieldError("?wait" if wait is not None else "?ids", text)])
    ask = ask_of(context, request, wait)
    outcome = None
    if ask is not None:
        has = _list_known(context, request, until, known)
        holding = hold_list(context.runtime, named, until, has, limit, ask.seconds)
        outcome = await unless_gone(context, request, holding)
    jobs, following = await run_in_threadpool(service.list_jobs, context.runtime, limit, wanted, cursor, named)
    refuse_unknown(named, [job.id for job in jobs])
    state = list_state([Standing(job.id, job.version, job.marks.change, job.state) for job in jobs])
    tag = f"{context.runtime.incarnation}-{state.versions}-{state.changes}"
    body = JobList(jobs=[row_of(job) for job in jobs], next_cursor=following).model_dump_json().encode()
    return conditional(request, tag, body, waited(ask, outcome))


def _ids_in(ids: str | None, until: Until, waits: bool) -> list[str]:
    named = list(dict.fromkeys(one for one in (ids or "").split(",") if one))
    if ids is not None and not named:
        raise Invalid.of([FieldError("?ids", "names no job; leave it out for all of them")])
    if len(named) > MAX_IDS:
        raise Invalid.of([FieldError("?ids", f"{len(named)} jobs are named; {MAX_IDS} can be")])
    if waits and until in (Until.EPOCH, Until.CHECKPOINT):
        text = f"of many jobs, change, progress or terminal can be waited for; {until} of one: GET /jobs/{{id}}"
        raise Invalid.of([FieldError("?until", text)])
    if waits and until == Until.TERMINAL and not named:
        raise Invalid.of([FieldError("?ids", "name the jobs of which one is to end")])
    return named


def _list_known(context: Context, request: Request, until: Until, known: str | None) -> str | None:
    """The digest in the validator the client sent, whichever this wait compares; None when it sent none."""
    tags = tags_of(request) if known is None else [known.strip().removeprefix("W/").strip('"')]
    parts = [tag.split("-") for tag in tags if tag != "*"]
    if not parts:
        return None
    ours = next((one for one in parts if len(one) == 3 and one[0] == context.runtime.incarnation), None)
    if ours is None:
        return ""
    return ours[1] if until == Until.PROGRESS else ours[2]


async def get_job(
    context: Context,
    request: Request,
    job_id: str,
    wait: Wait = None,
    until: UntilParam = Until.CHANGE,
    since: Annotated[
        str | None,
        Query(max_length=100, description="the `version` or ETag of an earlier answer, where no header can be sent"),
    ] = None,
) -> Response:
    """Everything about one job, as of its last event. With `wait`, once there is news of it."""
    ask = ask_of(context, request, wait)
    outcome = None
    if ask is None:
        snapshot = await snapshot_of(context.runtime, job_id)
    else:
        known = version_known(context, request, since)
        holding = hold(context.runtime, job_id, until, known, ask.seconds)
        snapshot, outcome = await unless_gone(context, request, holding)
    tag = f"{context.runtime.incarnation}-{snapshot.version}"
    return conditional(request, tag, snapshot.body, waited(ask, outcome))


router.add_api_route(
    "/{job_id}",
    get_job,
    methods=["GET"],
    operation_id="getJob",
    response_model=None,
    responses={200: {"model": JobView}, 304: {}, 503: PROBLEM},
    route_class_override=Direct,
)


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


@router.post("/{job_id}/pause", status_code=202, operation_id="pauseJob", responses={409: PROBLEM})
def post_pause(context: Context, job_id: str, body: Annotated[PauseRequest | None, Body()] = None) -> Paused:
    """Have a job stopped, a training with a checkpoint, until it is resumed; one that is queued is held."""
    job = service.ask_pause(context.runtime, job_id, None if body is None else body.grace_s)
    return Paused(id=job.id, state=job.state, pause_asked_at=job.pause_asked_at)


@router.post("/{job_id}/resume", status_code=202, operation_id="resumeJob", responses={409: PROBLEM})
def post_resume(context: Context, job_id: str) -> Paused:
    """Have a paused job go on, with another attempt, through the queue."""
    job = service.ask_resume(context.runtime, job_id)
    return Paused(id=job.id, state=job.state, pause_asked_at=job.pause_asked_at)


@router.post("/{job_id}/checkpoint", status_code=202, operation_id="checkpointJob", responses={409: PROBLEM})
def post_checkpoint(context: Context, job_id: str) -> CheckpointAsked:
    """Have a running training save and judge a checkpoint at its next step."""
    return CheckpointAsked(id=job_id, request=service.ask_checkpoint(context.runtime, job_id))


@router.get(
    "/{job_id}/stack",
    operation_id="getStack",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}, "description": "as of now"}, 409: PROBLEM, 503: PROBLEM},
)
def get_stack(context: Context, job_id: str) -> Response:
    """Stacks of every thread of a running job's processes, data loader workers included; takes up to 5 s."""
    return Response(take_stack(context.runtime, job_id), media_type="text/plain; charset=utf-8")


@router.get("/{job_id}/checkpoints", operation_id="listCheckpoints")
def get_checkpoints(context: Context, job_id: str) -> CheckpointList:
    """Checkpoints of a job with their verdicts, oldest first."""
    found = service.list_checkpoints(context.runtime, job_id)
    return CheckpointList(checkpoints=[CheckpointRow.model_validate(vars(one)) for one in found])
