"""What clients are shown of GPUs, of the host, and of a job over time."""

import json
import sys
from collections.abc import Collection, Iterator
from datetime import datetime
from typing import Any

from pydantic import BaseModel, Field

from server.db.queries import events as event_queries
from server.db.queries import leases as lease_queries
from server.domain.sample import GpuSample, HostSample, blocked_by
from server.services.jobs import load_job
from server.services.runtime import Runtime
from server.services.series import Series, read_series, thin

TRAINING = ("progress", "metric", "epoch")


class GpuRow(GpuSample):
    """A GPU or MIG instance, and who has it."""

    job: str | None = Field(description="id of the job that holds it")
    given: bool = Field(description="whether jobs may be given it at all; see EYAS_GPUS")
    in_the_way: str | None = Field(description="what else keeps it from being handed out: a stranger, a loss")


class GpuList(BaseModel):
    """All GPUs, each followed by its MIG instances."""

    gpus: list[GpuRow]
    driver: str | None
    reason: str | None = Field(description="why `gpus` is not as of now; null also when the host has none")
    time: datetime | None = Field(description="when they were looked at")
    age_s: float | None


class HostView(BaseModel):
    """The host as it was last looked at."""

    host: HostSample | None
    reason: str | None = Field(description="why `host` is not as of now")
    time: datetime | None
    age_s: float | None
    collectors_left_behind: int = Field(description="collectors that hang in the kernel and do not die")


class MetricSeries(BaseModel):
    """One quantity over time."""

    points: list[tuple[float, float]] = Field(description="[unix time in seconds, value], oldest first")


class JobMetrics(BaseModel):
    """A job over time."""

    names: list[str] = Field(description="all there are")
    series: dict[str, MetricSeries] = Field(description="those asked for; all when none was named")


def list_gpus(runtime: Runtime) -> GpuList:
    """The GPUs of this host."""
    hardware = runtime.hardware
    with runtime.database.read() as session:
        holders = {lease.uuid: lease.job_id for lease in lease_queries.every(session)}
    sample = hardware.sample
    given = {gpu.uuid for gpu in hardware.gpus(holders)}
    rows = []
    for gpu in hardware.gpu_samples:
        job = holders.get(gpu.uuid or "")
        blocked = None if gpu.mig else blocked_by(gpu, job)
        rows.append(GpuRow(**dict(gpu), job=job, given=gpu.uuid in given, in_the_way=blocked))
    return GpuList(
        gpus=rows,
        driver=None if sample is None else sample.nvml.driver,
        reason=hardware.gpus_unknown(),
        time=None if sample is None else sample.time,
        age_s=None if sample is None else round(hardware.age_s, 1),
    )


def show_host(runtime: Runtime) -> HostView:
    """CPU, memory, disks and network."""
    hardware = runtime.hardware
    sample = hardware.sample
    return HostView(
        host=None if sample is None else sample.host,
        reason=hardware.silence(),
        time=None if sample is None else sample.time,
        age_s=None if sample is None else round(hardware.age_s, 1),
        collectors_left_behind=hardware.left_behind,
    )


def job_metrics(
    runtime: Runtime, job_id: str, names: Collection[str] | None, max_points: int, since: float
) -> JobMetrics:
    """Samples and training metrics of a job, thinned.

    Args:
        runtime: of the daemon.
        job_id: which job.
        names: what is asked for; None for all. `gpu.0.*` stands for all that begin so.
        max_points: of each series.
        since: unix time in seconds; only later points.

    Raises:
        NotFound: there is no such job.
    """
    job = load_job(runtime, job_id)
    found = read_series(runtime.job_dir(job.id).metrics, since)
    with runtime.database.read() as session:
        for text in event_queries.of_types(session, job.id, TRAINING):
            event = json.loads(text)
            time = datetime.fromisoformat(event["time"]).timestamp()
            for name, value in _training_values(event):
                found.setdefault(name, Series())
                if time > since:
                    found[name].add(time, value)
    shown = {
        name: MetricSeries(points=thin(series, max_points))
        for name, series in sorted(found.items())
        if names is None or _asked_for(name, names)
    }
    return JobMetrics(names=sorted(found), series=shown)


def _asked_for(name: str, names: Collection[str]) -> bool:
    return name in names or any(one.endswith("*") and name.startswith(one[:-1]) for one in names)


def _training_values(event: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """`train.loss`, `train.accuracy.0` ... of progress, `val.loss` of epochs, other names as the stage gave them."""
    if event["type"] == "progress":
        for name in ("step", "loss", "accuracy", "lr", "tokens_per_s"):
            yield from _numbers(f"train.{name}", event.get(name))
    elif event["type"] == "metric":
        for name, value in event["values"].items():
            yield from _numbers(f"train.{name}", value)
    else:
        for name, value in (event.get("val") or {}).items():
            yield from _numbers(f"val.{name}", value)


def _numbers(name: str, value: object) -> Iterator[tuple[str, float]]:
    """The value under its name, those of a list each with its place; none that is no number a float can be."""
    if isinstance(value, bool):
        return
    if isinstance(value, (int, float)):
        if abs(value) <= sys.float_info.max:
            yield name, float(value)
    elif isinstance(value, list):
        for place, one in enumerate(value):
            yield from _numbers(f"{name}.{place}", one)
