"""Stacks of a stage and of its helpers, appended to the attempt's stacks.txt by the shim. Standard library only.

== stack ID time
-- pid N stage: command line
...                             by faulthandler in the process itself (SIGUSR1), by py-spy, or what /proc tells
-- pid M helper: command line
== end ID
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from eagle3_core.contract import proctree

ANSWER_S = 1.0
SETTLED_S = 0.06
ALL_S = 5.0
MAX_PROCESSES = 40


def take(stage_pid: int, pids: list[int], file: Path, request_id: str, now: str) -> None:
    """Append the stacks of the stage and of its other processes."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    end = time.monotonic() + ALL_S
    try:
        _write(descriptor, f"== stack {request_id} {now}\n")
        others = [pid for pid in pids if pid != stage_pid]
        for pid in [stage_pid, *others][:MAX_PROCESSES]:
            role = "stage" if pid == stage_pid else "helper"
            _write(descriptor, f"-- pid {pid} {role}: {_command(pid)}\n")
            if time.monotonic() > end or not (_by_itself(descriptor, pid, stage_pid) or _by_py_spy(descriptor, pid)):
                _write(descriptor, _by_proc(pid))
        if len(others) >= MAX_PROCESSES:
            _write(descriptor, f"-- {len(others) + 1 - MAX_PROCESSES} further processes are left out\n")
        _write(descriptor, f"== end {request_id}\n")
    finally:
        os.close(descriptor)


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process handles a signal, which would end it otherwise."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _by_itself(descriptor: int, pid: int, stage_pid: int) -> bool:
    """Have a process of ours write its stacks; whether it did.

    Only the stage, its forks and what it spawned: another program may mean something else by that signal.
    """
    command = _command(pid)
    ours = command == _command(stage_pid) or "multiprocessing.spawn" in command
    if not ours or not catches(pid, signal.SIGUSR1):
        return False
    before = size = os.fstat(descriptor).st_size
    if not proctree.send(pid, signal.SIGUSR1, lambda _: catches(pid, signal.SIGUSR1)):
        return False
    end = time.monotonic() + ANSWER_S
    settled = time.monotonic()
    while time.monotonic() < end:
        time.sleep(0.01)
        if (now := os.fstat(descriptor).st_size) != size:
            size, settled = now, time.monotonic()
        elif size > before and time.monotonic() - settled >= SETTLED_S:
            return True
    return size > before


def _by_py_spy(descriptor: int, pid: int) -> bool:
    program = shutil.which("py-spy")
    if program is None or "python" not in _link(pid, "exe"):
        return False
    try:
        command = [program, "dump", "--nonblocking", "--pid", str(pid)]
        found = subprocess.run(command, capture_output=True, timeout=ANSWER_S, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return False
    os.write(descriptor, found.stdout)
    return bool(found.stdout)


def _by_proc(pid: int) -> str:
    """What the kernel tells of a process: state, and where in the kernel it waits."""
    told = []
    for name in ("wchan", "syscall", "stack"):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/{name}").read_text().strip()
            told += [f"  {name}: {line}" for line in text.splitlines()[:20]]
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        told += [f"  {line}" for line in lines if line.startswith(("State:", "Threads:"))]
    return "\n".join(told or ["  it is gone, or tells nothing"]) + "\n"


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:500]
    except OSError:
        return ""


def _link(pid: int, name: str) -> str:
    try:
        return str(Path(f"/proc/{pid}/{name}").readlink())
    except OSError:
        return ""


def _write(descriptor: int, text: str) -> None:
    os.write(descriptor, text.encode())
