"""Pipelines: a chain as one document, JSON or YAML."""

from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import ValidationError

from server.api.access import YAML, media_type
from server.api.context import Context, From
from server.api.jobs import CancelRequest, IdempotencyKey
from server.api.problems import Problem
from server.api.routes import KnownQuery
from server.domain.faults import fault_of
from server.errors import MAX_ERRORS, Invalid
from server.services.documents import read_json, read_yaml
from server.services.dry_run import DryRun, dry_run
from server.services.pipelines import (
    PipelineList,
    PipelineView,
    cancel_pipeline,
    list_pipelines,
    place,
    show_pipeline,
    submit_pipeline,
)
from server.services.requests import PipelineRequest
from server.services.scopes import refuse_stages

_PROBLEM = {"model": Problem}
_KNOWN: dict[int | str, dict[str, Any]] = {422: _PROBLEM}

router = APIRouter(prefix="/pipelines", tags=["pipelines"], responses=_KNOWN, route_class=KnownQuery)


async def _document(request: Request) -> PipelineRequest:
    """The body, as JSON or YAML says it."""
    data = await request.body()
    value = await run_in_threadpool(read_yaml, data) if media_type(request.headers) == YAML else read_json(data)
    try:
        return PipelineRequest.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False)[:MAX_ERRORS]
        shown = [fault_of(one, one["loc"], PipelineRequest, "") for one in found]
        raise Invalid.of(shown, error.error_count()) from None


@router.post(
    "",
    status_code=201,
    operation_id="submitPipeline",
    response_model=PipelineView | DryRun,
    responses={
        201: {"model": PipelineView},
        200: {"model": PipelineView | DryRun, "description": "stored before with this key; or a dry run"},
        409: _PROBLEM,
        507: _PROBLEM,
    },
)
def post_pipeline(
    context: Context,
    caller: From,
    document: Annotated[PipelineRequest, Depends(_document)],
    response: Response,
    idempotency_key: IdempotencyKey = None,
    dry: Annotated[bool, Query(alias="dry_run", description="store nothing; tell what would be stored")] = False,
) -> PipelineView | DryRun:
    """Store a whole chain, all or nothing; once for each Idempotency-Key."""
    stages = [(f"/stages/{name}", stage.stage or name) for name, stage in document.stages.items()]
    refuse_stages(context.runtime.settings, caller, stages)
    if dry:
        response.status_code = 200
        return dry_run(context.runtime, place(context.runtime, document))
    view, created = submit_pipeline(context.runtime, document, idempotency_key)
    if not created:
        response.status_code = 200
    response.headers["Location"] = f"/pipelines/{view.id}"
    return view


@router.get("", operation_id="listPipelines")
def get_pipelines(
    context: Context,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    cursor: Annotated[str | None, Query(max_length=64, description="next_cursor of the page before")] = None,
) -> PipelineList:
    """Pipelines, newest first."""
    return list_pipelines(context.runtime, limit, cursor)


@router.get("/{pipeline_id}", operation_id="getPipeline", responses={404: _PROBLEM})
def get_pipeline(context: Context, pipeline_id: str) -> PipelineView:
    """A pipeline with its jobs, in the order of its document; its state follows from theirs."""
    return show_pipeline(context.runtime, pipeline_id)


@router.post("/{pipeline_id}/cancel", status_code=202, operation_id="cancelPipeline", responses={404: _PROBLEM})
def post_cancel(
    context: Context, pipeline_id: str, body: Annotated[CancelRequest | None, Body()] = None
) -> PipelineView:
    """Have every job of a pipeline stopped that has not ended."""
    asked = body or CancelRequest()
    return cancel_pipeline(context.runtime, pipeline_id, asked.grace_s, asked.checkpoint)
