"""What the operating system says of itself, for `eyas doctor`."""

import ctypes
import json
import os
import resource
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

_TIMEX_BYTES = 208
_TIME_ERROR = 5
"""What adjtimex(2) returns while nobody keeps the clock."""

NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs"}
)


class Answer(NamedTuple):
    """What a program said: its JSON value, or why there is none."""

    value: Any
    trouble: str | None


def ask(command: list[str], limit_s: float) -> Answer:
    """Run a program that prints one JSON value; one that hangs, as a driver may, is ended and left alone."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        return Answer(None, f"{command[0]} cannot be started: {error.strerror}")
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return Answer(None, f"no answer within {limit_s:g} s")
    if process.returncode != 0:
        lines = err.decode(errors="replace").strip().splitlines()
        return Answer(None, lines[-1] if lines else f"exit code {process.returncode}")
    try:
        return Answer(json.loads(out), None)
    except ValueError:
        return Answer(None, f"{out[:100]!r} is not what was asked for")


def file_system_of(path: Path) -> str:
    """The type of the file system a path is on, such as ext4 or nfs4; "unknown" where /proc does not tell."""
    best, found = "", "unknown"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        fields = line.split()
        mount = fields[4].encode().decode("unicode_escape")
        if path.is_relative_to(mount) and len(mount) >= len(best):
            best, found = mount, fields[fields.index("-") + 1]
    return found


def clock_is_kept() -> bool | None:
    """Whether somebody (NTP, PTP, the hypervisor) keeps the clock right; None where the kernel does not say."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
        state = library.adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))  # modes 0: only read
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _TIME_ERROR


def free_bytes(path: Path) -> tuple[int, int]:
    """Bytes that may still be written, and size, of the file system a path is on.

    Raises:
        OSError: it does not exist.
    """
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize


def open_files_limit() -> tuple[int, int]:
    """Soft and hard limit of open files."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def service_of(pid: int) -> str | None:
    """The systemd service a process belongs to, or None."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    parts = [part for line in lines for part in line.split(":", 2)[-1].split("/")]
    return next((part for part in reversed(parts) if part.endswith(".service")), None)


def kill_mode(service: str) -> str | None:
    """KillMode of a systemd service, or None where systemctl does not tell."""
    for scope in ([], ["--user"]):
        command = ["systemctl", *scope, "show", "--property=KillMode", "--value", "--", service]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.strip()
    return None
