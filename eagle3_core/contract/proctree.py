"""Finding and ending all processes of a job. Standard library only.

Three nets, because each misses something: descendants (a child that called setsid is still one, as the shim is
subreaper), the job's mark in the environment (found even when the shim is dead), and the job's control group where
one could be made (found even with another environment). A pid is turned into a pidfd first and judged again
afterwards, so that a signal never reaches a later holder of the number.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

from eagle3_core.contract.identity import start_ticks
from eagle3_core.contract.jobdir import JOB_ID_VARIABLE

GROUP_PREFIX = "eyas-"
"""A job's control group is named by this and its id."""


def all_pids() -> list[int]:
    """Every process seen from here."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - speed


def carries_mark(pid: int, job_id: str) -> bool:
    """Whether a process was started with this job's mark in its environment, or is in its control group."""
    mark, group = f"{JOB_ID_VARIABLE}={job_id}".encode(), f"{GROUP_PREFIX}{job_id}".encode()
    if mark in _read(pid, "environ").split(b"\0"):
        return True
    return group in _read(pid, "cgroup").replace(b"\n", b"/").split(b"/")


def job_of(pid: int) -> str | None:
    """The id of the job whose mark a process carries, in its environment or by its control group; None without one."""
    for text in _read(pid, "environ").split(b"\0"):
        name, _, value = text.partition(b"=")
        if name == JOB_ID_VARIABLE.encode():
            return value.decode(errors="replace")
    for name in _read(pid, "cgroup").replace(b"\n", b"/").split(b"/"):
        if name.startswith(GROUP_PREFIX.encode()):
            return name.removeprefix(GROUP_PREFIX.encode()).decode(errors="replace")
    return None


def _read(pid: int, file: str) -> bytes:
    """A file of /proc/PID; nothing where it cannot be read."""
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes()
    except OSError:
        return b""


def marked(job_id: str) -> list[int]:
    """Live processes that carry the job's mark."""
    return [pid for pid in all_pids() if carries_mark(pid, job_id) and start_ticks(pid) is not None]


def parent_of(pid: int) -> int | None:
    """The parent's pid, or None when the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return int(stat[stat.rindex(b")") + 2 :].split()[1])


def descendants(ancestor: int) -> list[int]:
    """Live processes below `ancestor`, itself excluded."""
    children: dict[int, list[int]] = {}
    for pid in all_pids():
        parent = parent_of(pid)
        if parent is not None:
            children.setdefault(parent, []).append(pid)
    found: list[int] = []
    queue = [ancestor]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return [pid for pid in found if start_ticks(pid) is not None]


def send(pid: int, number: signal.Signals, still_ours: Callable[[int], bool]) -> bool:
    """Signal a process that is ours; returns whether it was there to be signalled."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not still_ours(pid):
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(descriptor, number)
            return True
        return False
    finally:
        os.close(descriptor)


def tree_of(job_id: str, ancestor: int | None, spare: Iterable[int] = ()) -> list[int]:
    """Live processes of a job by both nets, without those to `spare`."""
    found = set(marked(job_id))
    if ancestor is not None:
        found |= set(descendants(ancestor))
    return sorted(found - set(spare) - {os.getpid()})


def signal_tree(job_id: str, ancestor: int | None, number: signal.Signals, spare: Iterable[int] = ()) -> int:
    """Signal every process of a job once; returns how many there were."""

    def still_ours(pid: int) -> bool:
        return carries_mark(pid, job_id) or (ancestor is not None and pid in descendants(ancestor))

    return sum(send(pid, number, still_ours) for pid in tree_of(job_id, ancestor, spare))
