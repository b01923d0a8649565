"""What the system can say about an end: memory groups, the kernel's log, shared memory. Standard library only.

cgroup v2   /sys/fs/cgroup/<path>/memory.events              oom_kill N
cgroup v1   /sys/fs/cgroup/memory/<path>/memory.oom_control  oom_kill N
/dev/kmsg   lines the kernel wrote since the shim began; root only as a rule
"""

import contextlib
import os
import re
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_KILLED = re.compile(r"(?:oom-kill:.*\bpid=|Killed process )(\d+)")
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"


def own_groups(groups: Path = _GROUPS, membership: Path = Path("/proc/self/cgroup")) -> list[Path]:
    """Where the memory group (v1) and the group (v2) this process is in may be, the likeliest first."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    candidates = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        place = path.lstrip("/")
        if "memory" in controllers.split(","):
            # In a container the path may be the host's, while only the container's own group is mounted.
            candidates += [groups / "memory" / place, groups / "memory"]
        elif number == "0":
            candidates += [groups / place, groups / "unified" / place, groups]
    return candidates


def oom_counter(groups: Path = _GROUPS, membership: Path = Path("/proc/self/cgroup")) -> Path | None:
    """The file that counts what the kernel's memory killer did in this process's own group, or None."""
    for group in own_groups(groups, membership):
        for name in ("memory.oom_control", "memory.events"):
            if (group / name).is_file():
                return group / name
    return None


def oom_kills(counter: Path | None) -> int | None:
    """How many processes of the group were killed for want of memory so far; None where nobody counts."""
    if counter is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        for line in counter.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None


def others_in_group(counter: Path | None, own: set[int]) -> bool:
    """Whether processes of somebody else are in the group too, so that a kill counted there may be theirs."""
    if counter is None:
        return False
    try:
        members = {int(pid) for pid in (counter.parent / "cgroup.procs").read_text().split()}
    except (OSError, ValueError):
        return True
    return not members <= own


class KernelLog:
    """What the kernel writes from now on, where it may be read."""

    def __init__(self, path: str = "/dev/kmsg") -> None:
        self._fd: int | None = None
        with contextlib.suppress(OSError):
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)

    def kill_of(self, pid: int) -> str | None:
        """The line that tells of this process being killed for want of memory, or None."""
        if self._fd is None or os.readlink("/proc/self/ns/pid") != _INITIAL_PID_NAMESPACE:  # noqa: PTH115 - as spelt
            return None  # other namespaces have other numbers
        for _ in range(10_000):
            try:
                record = os.read(self._fd, 8192)
            except BrokenPipeError:  # lines were overwritten before they were read
                continue
            except OSError:
                return None
            if not record:
                return None
            line = record.partition(b";")[2].split(b"\n")[0].decode(errors="replace")
            found = _KILLED.search(line)
            if found is not None and int(found[1]) == pid:
                return line[:500]
        return None


def shared_memory_free(path: str = "/dev/shm") -> tuple[int, int] | None:  # noqa: S108 - its usual place
    """(free, total) bytes of shared memory, or None where there is none."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
