"""Looking at a process that is not ours, before it is watched. Nothing is done to it."""

from dataclasses import dataclass
from pathlib import Path

from eagle3_core.contract.identity import boot_id, start_ticks
from eagle3_core.contract.jobdir import JOB_ID_VARIABLE

PF_KTHREAD = 0x0020_0000
"""Flag of a process that is a thread of the kernel. Source: include/linux/sched.h."""


@dataclass(frozen=True)
class ForeignProcess:
    """Who a process is.

    Attributes:
        start_ticks, boot_id: name it for ever.
        job_id: the job of ours it belongs to, if it does.
        kernel: a thread of the kernel, which runs no program.
        stdout: where its stdout goes, as the kernel spells it; None where that may not be seen.
    """

    start_ticks: int
    boot_id: str
    job_id: str | None
    kernel: bool
    stdout: str | None


def look_at(pid: int) -> ForeignProcess | None:
    """A live process, or None where there is none that can be seen from here."""
    place = Path(f"/proc/{pid}")
    ticks = start_ticks(pid)
    stat = _read(place / "stat")
    if ticks is None or not stat:
        return None
    flags = int(stat[stat.rindex(b")") + 2 :].split()[6])
    mark = f"{JOB_ID_VARIABLE}=".encode()
    marks = [entry for entry in _read(place / "environ").split(b"\0") if entry.startswith(mark)]
    return ForeignProcess(
        ticks,
        boot_id(),
        marks[0].removeprefix(mark).decode(errors="replace") if marks else None,
        kernel=bool(flags & PF_KTHREAD),
        stdout=_link(place / "fd/1"),
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _link(path: Path) -> str | None:
    try:
        return str(path.readlink())
    except OSError:
        return None
