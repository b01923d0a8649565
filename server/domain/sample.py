"""One look at GPUs and host, as the collector tells it, and what it means for handing GPUs out."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from server.domain.resources import GIB, Gpu, gib

UNSEEN_BYTES = 2 * GIB
"""Used memory beyond that of the processes seen: less is the driver's own, more is somebody who cannot be seen."""


class _Told(BaseModel):
    model_config = ConfigDict(frozen=True)


class GpuProcess(_Told):
    """A process on a GPU."""

    pid: int = Field(description="as the driver counts: the host's number")
    kind: str = Field(description="compute or graphics")
    memory: int | None = Field(description="bytes on this GPU")
    user: str | None = Field(description="null when the process cannot be seen from here, as from within a container")
    foreign_user: bool | None = Field(description="whether that is another user than the daemon's")
    job: str | None = Field(description="id of the job it belongs to")


class GpuSample(_Told):
    """A GPU or MIG instance. A field that cannot be read is null, and `reasons` says why."""

    index: int = Field(description="NVML's; may change whenever the driver is loaded anew")
    instance: int | None = Field(description="number of a MIG instance, null for a whole GPU")
    uuid: str | None
    parent: str | None = Field(description="UUID of the GPU a MIG instance is part of")
    name: str | None
    mig: bool = Field(description="cut into MIG instances, which are handed out in its place")
    lost: str | None = Field(description="why the GPU does not answer at all")
    utilization_percent: int | None
    memory_total: int | None = Field(description="bytes")
    memory_used: int | None = Field(description="bytes")
    memory_free: int | None = Field(description="bytes")
    power_w: float | None
    power_limit_w: float | None
    temperature_c: int | None
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    ecc_errors: int | None = Field(description="uncorrected, since the driver was loaded")
    throttle_reasons: list[str] | None
    processes: list[GpuProcess] | None
    reasons: dict[str, str] = Field(description="field -> why it is null")

    @property
    def label(self) -> str:
        """`3`, or `3:0` for a MIG instance."""
        return str(self.index) if self.instance is None else f"{self.index}:{self.instance}"


class NvmlState(_Told):
    """What NVML answered. `silent_s`: it has not, for so many seconds."""

    driver: str | None
    gpus: list[GpuSample]
    error: str | None
    absent: bool
    silent_s: float | None


class Disk(_Told):
    """A file system."""

    path: str
    total: int | None = Field(description="bytes")
    used: int | None
    free: int | None = Field(description="bytes that this user may still write")
    reason: str | None = Field(description="why the sizes are null")


class HostSample(_Told):
    """The host. A field that cannot be read is null, and `reasons` says why."""

    cpus: int = Field(description="CPUs the daemon, and so its jobs, may use")
    cpu_percent: float | None = Field(description="of all CPUs together")
    load_1: float | None
    load_5: float | None
    load_15: float | None
    ram_total: int | None = Field(description="bytes")
    ram_used: int | None = Field(description="bytes, without caches")
    ram_available: int | None = Field(description="bytes")
    swap_total: int | None = Field(description="bytes")
    swap_used: int | None = Field(description="bytes")
    disk_read_bytes_s: float | None
    disk_write_bytes_s: float | None
    net_receive_bytes_s: float | None = Field(description="all interfaces but the loopback")
    net_send_bytes_s: float | None
    disks: list[Disk] = Field(description="of the state directory and each root")
    reasons: dict[str, str] = Field(description="field -> why it is null")


class Sample(_Told):
    """One line of the collector."""

    boottime_s: float
    time: datetime
    nvml: NvmlState
    host: HostSample


def gpus_to_give(
    samples: Sequence[GpuSample], holders: Mapping[str, str], allowed: Collection[str] | None
) -> list[Gpu]:
    """The GPUs and MIG instances that jobs may be given, with what stands in the way of it.

    Args:
        samples: all there are.
        holders: UUID of a GPU -> id of the job that holds it.
        allowed: indices and UUIDs that may be given; None for all. A GPU's name allows its instances, too.
    """
    gpus = []
    for one in samples:
        if one.uuid is None or one.mig:
            continue
        names = {one.label, one.uuid, str(one.index), one.parent}
        if allowed is None or names & set(allowed):
            blocked = blocked_by(one, holders.get(one.uuid))
            gpus.append(Gpu(one.label, one.uuid, one.name, one.memory_total, one.memory_free, blocked))
    return gpus


def blocked_by(gpu: GpuSample, holder: str | None) -> str | None:
    """Why a GPU is not to be handed out, to follow "is"; None when nothing but its holder is in the way.

    Programs that draw on a screen are no reason: what they hold is missing from the free memory. On a GPU that is held,
    what cannot be seen is taken for the holder's.
    """
    if gpu.lost is not None:
        return f"not answering ({gpu.lost})"
    seen = 0
    for process in gpu.processes or ():
        seen += process.memory or 0
        holders_own = holder is not None and (process.job == holder or process.user is None)
        if process.kind == "compute" and process.memory != 0 and not holders_own:
            return f"used by pid {process.pid}{_whose(process)} ({gib(process.memory)})"
    unseen = (gpu.memory_used or 0) - seen
    if holder is None and unseen > UNSEEN_BYTES:
        return f"used by processes that cannot be seen from here ({gib(unseen)})"
    return None


def _whose(process: GpuProcess) -> str:
    if process.job is not None:
        return f" of job {process.job}, which does not hold it"
    if process.user is None:
        return ", which cannot be seen from here"
    return f" of another user, {process.user}" if process.foreign_user else ", which is none of a job"
