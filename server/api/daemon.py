"""The daemon in numbers: counts, version, readiness, and all of it for Prometheus."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, Field

from server.api.context import Context
from server.api.pages import VERSION
from server.api.problems import Problem
from server.api.routes import KnownQuery
from server.services.stats import Readiness, Stats, exposition, readiness, show_stats

_KNOWN: dict[int | str, dict[str, Any]] = {422: {"model": Problem}}

router = APIRouter(tags=["daemon"], responses=_KNOWN, route_class=KnownQuery)

EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


class Version(BaseModel):
    """Of the daemon and of what it speaks."""

    version: str
    schema_version: int = Field(description="of spec.json and record.json as they are written now")


@router.get("/stats", operation_id="getStats")
def get_stats(
    context: Context, days: Annotated[float, Query(gt=0, le=3650, description="back from now")] = 7.0
) -> Stats:
    """Jobs by state, how they ended lately and why, the queue, and GPU hours."""
    return show_stats(context.runtime, days)


@router.get("/version", operation_id="getVersion")
async def get_version() -> Version:
    """The version of the daemon."""
    return Version(version=VERSION, schema_version=1)


@router.get("/readyz", operation_id="getReadiness", responses={503: {"model": Readiness}})
def get_readiness(context: Context, response: Response) -> Readiness:
    """Whether loop, database and disk can do their work; 503 when not."""
    found = readiness(context.runtime, context.loop.alive)
    if not found.ready:
        response.status_code = 503
    return found


@router.get(
    "/metrics",
    operation_id="getPrometheusMetrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}, "description": "Prometheus' text format"}},
)
def get_prometheus_metrics(context: Context) -> Response:
    """Jobs by state, attempts by reason, progress of running jobs, GPUs; for Prometheus."""
    return Response(exposition(context.runtime), media_type=EXPOSITION)
