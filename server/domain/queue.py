"""What happens to queued jobs: which one starts, on which GPUs, which one cannot any more, and why the others wait.

One pass over the jobs, higher `priority` first and older first within it, over what the host has left:

    can start                          -> takes what it asks for
    must wait for jobs of ours to end  -> keeps what is free of what it asks for; those behind it get the rest
    must wait for something else       -> keeps nothing (a stranger on its GPU, NVML silent, not due yet)

So a job that waits for many GPUs is not overtaken on them for ever by small ones behind it, a GPU it cannot use or
does not need works meanwhile, and a stranger's process that stays for days does not idle the rest of the host.
A job without a GPU also needs one of `max_running` places; one with a GPU is bounded by the GPUs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from eagle3_core.contract.exits import Reason
from server.domain.job import Job
from server.domain.outcome import Why
from server.domain.resources import (
    GIB,
    CannotBeMet,
    Gpu,
    GpuRef,
    Resources,
    check_host,
    computes_on_gpu,
    gib,
    may_serve,
    resolve,
)
from server.domain.states import LIVE_JOB, WAITING_JOB, JobState


@dataclass(frozen=True)
class Host:
    """What jobs may be given, as of now.

    Attributes:
        max_running: jobs without a GPU at the same time.
        cpus, ram_bytes: all the host has.
        gpus: those that jobs may be given.
        gpus_unknown: why nothing is known of the GPUs at the moment; None when `gpus` are all there are.
        leases: UUID of a GPU -> id of the job that holds it.
    """

    max_running: int
    cpus: int = 1
    ram_bytes: int = 0
    gpus: tuple[Gpu, ...] = ()
    gpus_unknown: str | None = None
    leases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    """Give it a process, and these GPUs. The job's resources are resolved."""

    job: Job
    gpus: tuple[GpuRef, ...] = ()


@dataclass(frozen=True)
class Finish:
    """It ends without having had one."""

    job: Job
    why: Why


@dataclass(frozen=True)
class Wait:
    """It stays, for this reason."""

    job: Job
    waiting: str


@dataclass(frozen=True)
class Hold:
    """It is paused."""

    job: Job


SLOTLESS = frozenset({"adopt"})
"""Stages that only watch: they take no slot and wait for none."""

Decision = Start | Finish | Wait | Hold


def decide(jobs: Sequence[Job], host: Host, not_due: Mapping[str, str] | None = None) -> list[Decision]:
    """One decision for each queued or paused job, the most urgent first.

    Args:
        jobs: all that have not ended.
        host: what there is to be given.
        not_due: id -> what the next attempt of a job waits for.
    """
    room = _Room(jobs, host)
    decisions: list[Decision] = []
    for job in sorted(jobs, key=lambda job: (-job.priority, job.number)):
        if job.state in WAITING_JOB:
            watches = Start(job) if job.stage in SLOTLESS else None
            decisions.append(_blocked(job, not_due or {}) or watches or room.admit(job))
    return decisions


def ready(jobs: Sequence[Job]) -> list[Job]:
    """The queued jobs that nothing but a slot, or room for them, keeps from starting."""
    return [job for job in jobs if job.state in WAITING_JOB and _blocked(job, {}) is None]


def _blocked(job: Job, not_due: Mapping[str, str]) -> Decision | None:
    if job.intents.dependency_failed:
        failed = next(d for d in job.depends_on if d.state in (JobState.FAILED, JobState.CANCELLED))
        ended = f"{failed.state} ({failed.reason})" if failed.reason else str(failed.state)
        cause, hint = f"{failed.name} ({failed.id}), which it needs, {ended}", f"retry job {failed.id}, then this one"
        return Finish(job, Why(Reason.DEPENDENCY_FAILED, cause, hint))
    if job.intents.cancel:
        when = "before it started" if job.attempt is None else "before its next attempt"
        return Finish(job, Why(Reason.CANCELLED_BY_USER, f"cancelled {when}"))
    if job.intents.pause:
        return Hold(job)
    open_ones = [d for d in job.depends_on if d.state != JobState.SUCCEEDED]
    if open_ones:
        return Wait(job, "waits for " + ", ".join(d.name for d in open_ones))
    return Wait(job, not_due[job.id]) if job.id in not_due else None


class _Room:
    """What is left while the jobs are gone through."""

    def __init__(self, jobs: Sequence[Job], host: Host) -> None:
        self._host = host
        live = [job for job in jobs if job.state in LIVE_JOB and job.stage not in SLOTLESS]
        self._places = host.max_running - sum(job.attempt is None or not job.attempt.gpus for job in live)
        self._cpus = host.cpus - sum(job.resources.cpus or 0 for job in live)
        self._ram = host.ram_bytes - sum(_ram(job.resources) for job in live)
        self._kept: dict[str, Job] = {}
        names = {job.id: job.name for job in live}
        self._taken: dict[str, str] = {}
        for gpu in host.gpus:
            if (holder := host.leases.get(gpu.uuid)) is not None:
                ending = "" if holder in names else ", whose processes are not all gone yet"
                self._taken[gpu.uuid] = f"used by job {names.get(holder, '')} ({holder})".replace("  ", " ") + ending
            elif gpu.blocked is not None:
                self._taken[gpu.uuid] = gpu.blocked

    def admit(self, job: Job) -> Start | Wait:
        """Start it on what is left, or let it wait."""
        host, asked = self._host, job.resources
        if host.gpus_unknown is not None and _depends_on_gpus(job):
            what = _words(asked) if asked.gpus or asked.gpu_ids else "a look at the GPUs"
            return Wait(job, f"waiting for {what}; {host.gpus_unknown}")
        try:
            wanted = asked if host.gpus_unknown is not None else resolve(asked, job.stage, job.params, host.gpus)
            check_host(wanted, host.cpus, host.ram_bytes)
        except CannotBeMet as error:
            return Wait(job, f"this host cannot give what it asks for: {error.message}")
        wanted = wanted.model_copy(update={"gpus": wanted.gpus or 0})
        free = self._free(wanted)
        lacks = self._lacks(wanted, free)
        if not lacks:
            chosen = sorted(free, key=lambda gpu: (gpu.memory_total or 0, host.gpus.index(gpu)))[: wanted.gpus]
            self._take(wanted, chosen, f"used by job {job.name} ({job.id})")
            by_index = sorted(chosen, key=host.gpus.index)
            return Start(replace(job, resources=wanted), tuple(gpu.ref for gpu in by_index))
        if self._within_reach(wanted):
            self._keep(job, wanted, free)
        return Wait(job, "; ".join(lacks))

    def _free(self, wanted: Resources) -> list[Gpu]:
        """GPUs that would do, now."""
        if not wanted.gpus:
            return []
        least = (wanted.gpu_memory_gib or 0) * GIB
        return [
            gpu
            for gpu in self._host.gpus
            if gpu.uuid not in self._taken
            and may_serve(gpu, wanted)
            and (not least or (gpu.memory_free is not None and gpu.memory_free >= least))
        ]

    def _within_reach(self, wanted: Resources) -> bool:
        """Whether the end of other jobs of ours is all that it takes."""
        least = (wanted.gpu_memory_gib or 0) * GIB
        ours = [
            gpu
            for gpu in self._host.gpus
            if gpu.blocked is None
            and may_serve(gpu, wanted)
            and (gpu.uuid in self._host.leases or gpu.memory_free is None or gpu.memory_free >= least)
        ]
        return len(ours) >= (wanted.gpus or 0)

    def _take(self, wanted: Resources, gpus: Sequence[Gpu], by: str) -> None:
        self._taken.update({gpu.uuid: by for gpu in gpus})
        self._places -= 0 if wanted.gpus else 1
        self._cpus -= wanted.cpus or 0
        self._ram -= _ram(wanted)

    def _keep(self, job: Job, wanted: Resources, free: Sequence[Gpu]) -> None:
        """What is free of what it waits for is not given to those behind it."""
        self._take(wanted, free[: wanted.gpus], f"kept for job {job.name} ({job.id}), which comes first")
        for name, asked in (("cpus", wanted.cpus), ("ram", wanted.ram_gib)):
            if asked is not None:
                self._kept.setdefault(name, job)
        self._places, self._cpus, self._ram = max(self._places, 0), max(self._cpus, 0), max(self._ram, 0)

    def _lacks(self, wanted: Resources, free: Sequence[Gpu]) -> list[str]:
        """What is missing, each in words; empty when it can start."""
        host, lacks = self._host, []
        if not wanted.gpus and self._places <= 0:
            which = " without a GPU" if host.gpus else ""
            runs = f"1 job{which} runs" if host.max_running == 1 else f"{host.max_running} jobs{which} run"
            lacks.append(f"{runs} at a time (EYAS_MAX_RUNNING)")
        if len(free) < (wanted.gpus or 0):
            lacks.append(f"waiting for {_words(wanted)}; {self._state_of_gpus(wanted, free)}")
        if wanted.cpus is not None and wanted.cpus > self._cpus:
            count = "1 CPU" if wanted.cpus == 1 else f"{wanted.cpus} CPUs"
            lacks.append(f"waiting for {count}; {self._cpus} of {host.cpus} are not asked for{self._first('cpus')}")
        if wanted.ram_gib is not None and _ram(wanted) > self._ram:
            left = f"{gib(self._ram)} of {gib(host.ram_bytes)} are not asked for"
            lacks.append(f"waiting for {wanted.ram_gib:g} GiB of memory; {left}{self._first('ram')}")
        return lacks

    def _first(self, name: str) -> str:
        job = self._kept.get(name)
        return "" if job is None else f", and job {job.name} ({job.id}) comes first"

    def _state_of_gpus(self, wanted: Resources, free: Sequence[Gpu]) -> str:
        """Of each GPU why it is not given, those with the same reason together."""
        groups: dict[str, list[str]] = {}
        for gpu in self._host.gpus:
            if wanted.gpu_ids and gpu.uuid not in wanted.gpu_ids:
                continue
            if not may_serve(gpu, wanted):
                why = f"too small ({gib(gpu.memory_total)})"
            elif gpu in free:
                why = "free"
            else:
                why = self._taken.get(gpu.uuid, f"left with {gib(gpu.memory_free)} free")
            groups.setdefault(why, []).append(gpu.index)
        return "; ".join(
            f"GPU {indices[0]} is {why}" if len(indices) == 1 else f"GPUs {', '.join(indices)} are {why}"
            for why, indices in groups.items()
        )


def _depends_on_gpus(job: Job) -> bool:
    """Whether a job cannot be started while nothing is known of the GPUs."""
    asked = job.resources
    if asked.gpus is not None:
        return asked.gpus > 0
    named = bool(asked.gpu_ids or asked.gpu_memory_gib)
    return named or computes_on_gpu(job.stage, job.params.get("device"))


def _ram(wanted: Resources) -> int:
    return round((wanted.ram_gib or 0) * GIB)


def _words(wanted: Resources) -> str:
    """`1 GPU with 40 GiB free`."""
    count = wanted.gpus or len(wanted.gpu_ids)
    what = "1 GPU" if count == 1 else f"{count} GPUs"
    if wanted.gpu_ids:
        what = f"{what} ({', '.join(wanted.gpu_ids)})"
    return what if wanted.gpu_memory_gib is None else f"{what} with {wanted.gpu_memory_gib:g} GiB free"
