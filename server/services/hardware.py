"""What is known of GPUs and host at the moment, and the samples kept of each running job.

collector --lines--> watcher thread --> latest sample --> queue, GET /gpus, GET /host
                                   `--> <job>/metrics/   of the jobs the loop follows

Nothing here waits for NVML. When it has not answered lately the queue is told so: no job gets a GPU then.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from eagle3_core.contract.jobdir import JobDir
from server.domain.job import Job
from server.domain.resources import Gpu, GpuRef
from server.domain.sample import GpuSample, Sample, gpus_to_give
from server.services.series import Recorder
from server.settings import Settings
from server.system import clock, machine
from server.system.watcher import DEADLINE_S, Watcher, collector_command

logger = logging.getLogger(__name__)

BUSY_S = 1.0
IDLE_S = 10.0
FRESH_S = 5.0
"""A GPU is handed out on the word of a sample no older than this."""

NVML_SILENT_S = 5.0
"""A collector whose NVML has been silent for so long is replaced."""

HOST_SERIES = (
    "cpu_percent",
    "load_1",
    "ram_used",
    "swap_used",
    "disk_read_bytes_s",
    "disk_write_bytes_s",
    "net_receive_bytes_s",
    "net_send_bytes_s",
)
GPU_SERIES = (
    "utilization_percent",
    "memory_used",
    "power_w",
    "temperature_c",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "ecc_errors",
)


class Hardware:
    """The latest sample, and what follows from it. Safe to use from any thread."""

    def __init__(self, settings: Settings, ring: Callable[[], None]) -> None:
        """Prepare; `ring` is called when a look that was waited for has been taken."""
        self._settings = settings
        self._ring = ring
        self._watcher: Watcher | None = None
        self._since = clock.boottime()
        self._wanted_at = self._since
        self._interval_s = IDLE_S
        self._sample: Sample | None = None
        self._had_gpus = False
        self._followed: dict[str, tuple[GpuRef, ...]] = {}
        self._recorders: dict[str, Recorder] = {}
        self.cpus = machine.cpu_count()
        self.ram_bytes = machine.ram_bytes()

    def start(self) -> None:
        """Have the collector started."""
        self._since = self._wanted_at = clock.boottime()
        paths = [str(path) for path in self._settings.all_roots]
        self._watcher = Watcher(collector_command(paths), self.take)
        self._watcher.start()

    def stop(self) -> None:
        """End it."""
        if self._watcher is not None:
            self._watcher.stop()
        for recorder in self._recorders.values():
            recorder.close()

    @property
    def sample(self) -> Sample | None:
        """The latest one; None before the first."""
        return self._sample

    @property
    def age_s(self) -> float:
        """Seconds since the latest sample, or since the start when there is none."""
        taken = self._since if self._sample is None else self._sample.boottime_s
        return max(0.0, clock.boottime() - taken)

    @property
    def left_behind(self) -> int:
        """Collectors that do not even die of SIGKILL."""
        return 0 if self._watcher is None else self._watcher.left_behind

    def follow(self, live: Sequence[Job], waiting: bool) -> None:
        """Keep samples of these jobs; look often as long as jobs run or wait."""
        self._followed = {job.id: job.attempt.gpus for job in live if job.attempt is not None}
        interval_s = BUSY_S if live or waiting else IDLE_S
        if interval_s != self._interval_s:
            self._interval_s, self._wanted_at = interval_s, clock.boottime()
            if self._watcher is not None:
                self._watcher.look_every(interval_s)

    def look_now(self) -> None:
        """GPUs were given back: what is known of them is out of date."""
        self._wanted_at = clock.boottime()
        if self._watcher is not None:
            self._watcher.look_now()

    def silence(self) -> str | None:
        """Why nothing is known of GPUs and host; None when the last word is recent enough to be shown."""
        if self.age_s <= self._interval_s + DEADLINE_S and self._sample is not None:
            return None
        if self._sample is None and self.age_s <= DEADLINE_S:
            return "GPUs and host have not been looked at yet"
        return f"the collector of GPU and host metrics has not answered for {self.age_s:.0f} s"

    def gpus_unknown(self) -> str | None:
        """Why it is not known which GPUs there are; None when it is."""
        if (silence := self.silence()) is not None:
            return silence
        assert self._sample is not None
        nvml = self._sample.nvml
        if nvml.silent_s is not None:
            return f"NVML has not answered for {nvml.silent_s + self.age_s:.0f} s"
        if nvml.absent and not self._had_gpus:
            return None
        return None if nvml.error is None else f"NVML says: {nvml.error}"

    def not_fresh(self) -> str | None:
        """Why no GPU can be handed out by what is known; None when it can."""
        if (unknown := self.gpus_unknown()) is not None:
            return unknown
        assert self._sample is not None
        if self._sample.nvml.absent or (self._sample.boottime_s >= self._wanted_at and self.age_s <= FRESH_S):
            return None
        if clock.boottime() - self._wanted_at <= FRESH_S:
            return "the GPUs are being looked at"
        return f"the collector of GPU and host metrics has not answered for {self.age_s:.0f} s"

    def gpus(self, holders: Mapping[str, str]) -> tuple[Gpu, ...]:
        """The GPUs jobs may be given, as they were last seen. `holders`: UUID -> id of the job that holds it."""
        return tuple(gpus_to_give(self.gpu_samples, holders, self._settings.gpus))

    @property
    def gpu_samples(self) -> list[GpuSample]:
        """All GPUs and MIG instances, as they were last seen."""
        return [] if self._sample is None else self._sample.nvml.gpus

    @property
    def hides_gpus(self) -> bool:
        """Whether a job without a GPU must be kept from seeing one: unless it is known that there is none."""
        return self.gpus_unknown() is not None or bool(self.gpu_samples)

    def take(self, line: bytes) -> bool:
        """Take a line of the collector; False when it had better be replaced."""
        try:
            sample = Sample.model_validate_json(line)
        except ValidationError as error:
            logger.error("the collector said something else: %s", str(error)[:300])
            return False
        waited_for = self._sample is None or self._sample.boottime_s < self._wanted_at <= sample.boottime_s
        self._sample = sample
        if waited_for:
            self._ring()
        if sample.nvml.gpus and not self._had_gpus:
            self._had_gpus = True
            self._warn_of_unknown_names()
        self._record(sample)
        return sample.nvml.silent_s is None or sample.nvml.silent_s < NVML_SILENT_S

    def _warn_of_unknown_names(self) -> None:
        known = {name for gpu in self.gpu_samples for name in (gpu.label, gpu.uuid)}
        for name in self._settings.gpus or ():
            if name not in known:
                logger.warning("EYAS_GPUS names %s, and there is no such GPU", name)

    def _record(self, sample: Sample) -> None:
        followed = self._followed
        for job_id in [job_id for job_id in self._recorders if job_id not in followed]:
            self._recorders.pop(job_id).close()
        for job_id, gpus in followed.items():
            recorder = self._recorders.get(job_id)
            if recorder is None:
                recorder = self._recorders[job_id] = Recorder(self._directory(job_id))
            recorder.add(sample.time.timestamp(), values_of(sample, job_id, gpus))

    def _directory(self, job_id: str) -> Path:
        return JobDir(self._settings.jobs_dir / job_id).metrics


def values_of(sample: Sample, job_id: str, gpus: Sequence[GpuRef]) -> dict[str, float | None]:
    """What is kept of a sample for one job: the host, its GPUs under the index they were given by, its own memory."""
    host = sample.host.model_dump(include=set(HOST_SERIES))
    values: dict[str, float | None] = {f"host.{name}": host[name] for name in HOST_SERIES}
    values["host.disk_free"] = sample.host.disks[0].free if sample.host.disks else None
    by_uuid = {gpu.uuid: gpu for gpu in sample.nvml.gpus}
    for ref in gpus:
        gpu = by_uuid.get(ref.uuid)
        shown = {} if gpu is None else gpu.model_dump(include=set(GPU_SERIES))
        for name in GPU_SERIES:
            values[f"gpu.{ref.index}.{name}"] = shown.get(name)
        known = None if gpu is None else gpu.processes
        own = None if known is None else sum(one.memory or 0 for one in known if one.job == job_id)
        values[f"gpu.{ref.index}.job_memory"] = own
    return values
