"""Whether there is room: at submit, when a job would start, and for the daemon itself.

submit   bytes it needs > free - what running jobs there will still write - low-water mark     refused, 507
start    the same, with what it has written already taken off                                  it waits, saying why
start    less free than the low-water mark, where it writes or in the state directory          it waits, saying why
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3_core.contract.params import STAGES, StageParams
from server.domain.job import Job
from server.domain.space import SMALL, Need, shown
from server.domain.states import LIVE_JOB
from server.errors import FieldError, InsufficientStorage
from server.services.sizes import need_of
from server.settings import Settings
from server.system import clock, disk

BELIEVED_S = 5.0
"""How long a look at what a job has written, or at inputs that were not there, is believed."""

TEXT_S = 30.0
"""How long what a job waits for is said in the same words; free bytes change all the time."""

SETTING = "EYAS_DISK_LOW_GB"


@dataclass(frozen=True)
class Planned:
    """A job of a request: where in the body it stands, what it is, where it will write."""

    pointer: str
    name: str
    params: StageParams
    output_dir: Path


class Space:
    """Room on the file systems that jobs and daemon write to. Safe to use from any thread."""

    def __init__(self, settings: Settings) -> None:
        self._state = settings.state
        self._low = int(settings.disk_low_gb * 10**9)
        self._needs: dict[str, tuple[float, Need]] = {}
        self._taken: dict[str, tuple[float, int]] = {}
        self._texts: dict[str, tuple[float, str]] = {}

    def refuse_what_cannot_fit(self, planned: Sequence[Planned], unfinished: Iterable[Job]) -> None:
        """Compare what the jobs of a request will write with what is free.

        Args:
            planned: all jobs of the request; what they write stays, so it adds up.
            unfinished: jobs that are stored; those that run will write on.

        Raises:
            InsufficientStorage: they cannot fit; names directory, bytes needed and free, and what to do.
        """
        promised = self._promised(unfinished)
        for one in planned:
            need = need_of(one.params)
            found = _ask(one.output_dir)
            if need.bytes is None or need.bytes <= SMALL or found is None:
                continue  # a job that hardly writes anything may wait for room
            device, free = found
            left = free - promised.get(device, 0) - self._low
            if need.bytes > left:
                text = (
                    f"{one.name} needs {shown(need.bytes)} in {one.output_dir} ({need.basis}); {shown(free)} are free "
                    f"there{self._not_for_it(promised.get(device, 0))}. Free space, {need.hint}"
                )
                field = "/output_dir" if "output_dir" in one.params.paths() else ""
                pointer = f"{one.pointer}/params{field}"
                raise InsufficientStorage(text, [FieldError(pointer, text)])
            promised[device] = promised.get(device, 0) + need.bytes

    def waiting(self, candidates: Sequence[Job], unfinished: Iterable[Job]) -> dict[str, str]:
        """Id -> what it waits for, of those `candidates` that there is no room for, as far as that was found out."""
        if not candidates:
            return {}
        promised = self._promised(unfinished)
        low = self.low(self._state)
        texts = {job.id: self._same_words(job.id, low or self._short(job, promised)) for job in candidates}
        return {job_id: text for job_id, text in texts.items() if text is not None}

    def short(self, job: Job, unfinished: Iterable[Job]) -> str | None:
        """What a job that is about to start waits for, None when there is room. Reads the headers of its inputs."""
        self._find_out(job)
        return self.waiting([job], unfinished).get(job.id)

    def _same_words(self, job_id: str, text: str | None) -> str | None:
        if text is None:
            self._texts.pop(job_id, None)
            return None
        since, said = self._texts.get(job_id, (float("-inf"), text))
        if clock.boottime() - since > TEXT_S:
            since, said = self._texts[job_id] = (clock.boottime(), text)
        return said

    def low(self, path: Path) -> str | None:
        """What to say of a path with less room than the low-water mark; None while there is more."""
        found = _ask(path)
        if found is None or found[1] >= self._low:
            return None
        return f"waits for {shown(self._low)} of free disk in {path}, {shown(found[1])} are free ({SETTING})"

    def forget(self, job_id: str) -> None:
        """The job has ended."""
        for known in (self._needs, self._taken, self._texts):
            known.pop(job_id, None)

    def _short(self, job: Job, promised: Mapping[int, int]) -> str | None:
        path = Path(job.output_dir)
        found = _ask(path)
        if found is None:
            return None
        if (low := self.low(path)) is not None:
            return low
        device, free = found
        left = self._left_to_write(job)
        others = promised.get(device, 0)
        if left <= free - others - self._low:
            return None
        return f"needs {shown(left)} in {path}, {shown(free)} are free{self._not_for_it(others)}"

    def _not_for_it(self, promised: int) -> str:
        parts = [f"{shown(promised)} of them for running jobs"] if promised else []
        parts += [f"{shown(self._low)} stay free ({SETTING})"] if self._low else []
        return f" ({', '.join(parts)})" if parts else ""

    def _promised(self, jobs: Iterable[Job]) -> dict[int, int]:
        """File system -> bytes that the running jobs will still write there."""
        found: dict[int, int] = {}
        for job in jobs:
            if job.state in LIVE_JOB and (place := _ask(Path(job.output_dir))) is not None:
                self._find_out(job)
                found[place[0]] = found.get(place[0], 0) + self._left_to_write(job)
        return found

    def _find_out(self, job: Job) -> None:
        """Have the job's need among the known ones; inputs that were not there are looked for again after a while."""
        now = clock.boottime()
        at, need = self._needs.get(job.id, (float("-inf"), Need(None, "")))
        if need.bytes is None and now - at > BELIEVED_S:
            self._needs[job.id] = (now, need_of(STAGES[job.stage].model_validate(job.params)))

    def _left_to_write(self, job: Job) -> int:
        """Bytes of its known need that are not on disk yet; 0 while it is not known."""
        _, need = self._needs.get(job.id, (0.0, Need(None, "")))
        if not need.bytes:
            return 0
        now = clock.boottime()
        at, taken = self._taken.get(job.id, (float("-inf"), 0))
        if now - at > BELIEVED_S:
            taken = disk.taken_bytes(Path(job.output_dir))
            self._taken[job.id] = (now, taken)
        return max(0, need.bytes - taken)


def _ask(path: Path) -> tuple[int, int] | None:
    """`disk.free_bytes`, or None where the file system does not say; the job itself will meet what is wrong there."""
    try:
        return disk.free_bytes(path)
    except OSError:
        return None
