"""Process identity that survives pid reuse and clock steps: boot id + start ticks. Standard library only.

A pid alone names whoever holds it now. /proc/PID/stat field 22 (start time in ticks since boot) together
with the boot id names one process for ever. A zombie (state Z) counts as gone.
"""

import functools
import socket
from pathlib import Path
from typing import NamedTuple


class ProcessIdentity(NamedTuple):
    """One process of one boot of one host."""

    pid: int
    start_ticks: int
    boot_id: str


@functools.cache
def boot_id() -> str:
    """The kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@functools.cache
def host_id() -> str:
    """The id of this host: its machine id, else its host name."""
    try:
        return Path("/etc/machine-id").read_text().strip() or socket.gethostname()
    except FileNotFoundError:
        return socket.gethostname()


def pid_namespace() -> str:
    """The pid namespace that pids seen here belong to, as the kernel spells it."""
    return str(Path("/proc/self/ns/pid").readlink())


def start_ticks(pid: int) -> int | None:
    """Start time of a live process in clock ticks since boot; None when it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name may hold spaces and parentheses: fields count from behind its last one.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def is_alive(identity: ProcessIdentity) -> bool:
    """Whether this very process (not a later holder of its pid) still runs on this boot."""
    return identity.boot_id == boot_id() and start_ticks(identity.pid) == identity.start_ticks
