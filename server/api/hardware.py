"""GPUs, the host, and a job over time."""

from typing import Annotated, Any

from fastapi import APIRouter, Query

from server.api.context import Context
from server.api.problems import Problem
from server.api.routes import KnownQuery
from server.services import metrics as service
from server.services.metrics import GpuList, HostView, JobMetrics

_PROBLEM = {"model": Problem, "content": {"application/problem+json": {}}}
_KNOWN: dict[int | str, dict[str, Any]] = {401: _PROBLEM, 403: _PROBLEM, 422: _PROBLEM}

router = APIRouter(tags=["hardware"], responses=_KNOWN, route_class=KnownQuery)


@router.get("/gpus", operation_id="listGpus")
def get_gpus(context: Context) -> GpuList:
    """The GPUs of this host, who holds them, and what stands in the way of handing them out."""
    return service.list_gpus(context.runtime)


@router.get("/host", operation_id="getHost")
def get_host(context: Context) -> HostView:
    """CPU, memory, disks and network of this host."""
    return service.show_host(context.runtime)


@router.get("/jobs/{job_id}/metrics", operation_id="getMetrics", responses={404: _PROBLEM})
def get_metrics(
    context: Context,
    job_id: str,
    names: Annotated[str | None, Query(max_length=4000, description="comma-separated; or as gpu.0.*")] = None,
    max_points: Annotated[int, Query(ge=2, le=10_000, description="of each series, its extremes kept")] = 500,
    since: Annotated[float, Query(ge=0, le=1e12, description="unix time in seconds; only later points")] = 0.0,
) -> JobMetrics:
    """GPUs, host and training of a job over time."""
    asked = None if names is None else [name.strip() for name in names.split(",") if name.strip()]
    return service.job_metrics(context.runtime, job_id, asked, max_points, since)
