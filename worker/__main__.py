"""The shim: the stage's parent, and the only one who can learn its exit code. Standard library only.

    daemon --spawns--> shim (python -P -m worker ATTEMPT_DIR) --spawns--> stage (python -P -m worker.run ATTEMPT_DIR)

It needs no daemon: whoever writes control/cancel.json has the stage stopped. It makes process.json before the stage
exists (from then on the attempt counts as begun), and exit.json when stage and everything it left behind are gone.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eagle3_core.contract import proctree
from eagle3_core.contract.exits import DEFAULT_GRACE_S
from eagle3_core.contract.identity import boot_id, host_id, pid_namespace, start_ticks
from eagle3_core.contract.jobdir import (
    LOCK_FD_VARIABLE,
    AttemptDir,
    JobDir,
    fsync_directory,
    write_json,
)

PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.2
LEFT_BEHIND_GRACE_S = 1.0
EXIT_BYTES = 4096


def boottime() -> float:
    """Seconds since boot, sleep included; no clock change moves it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def utc_now() -> str:
    """The time as events spell it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class ExitRecord:
    """exit.json with its disk blocks taken beforehand, so that a full disk cannot lose it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reserved = path.with_name(f".{path.name}.reserved")
        self._fd = os.open(self._reserved, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        os.posix_fallocate(self._fd, 0, EXIT_BYTES)
        os.fsync(self._fd)

    def write(self, record: dict[str, Any]) -> None:
        """Put the record into the reserved blocks and give it its name."""
        data = json.dumps(record, indent=1).encode() + b"\n"
        os.pwrite(self._fd, data, 0)
        os.ftruncate(self._fd, len(data))
        os.fsync(self._fd)
        self._reserved.replace(self._path)
        fsync_directory(self._path.parent)


class Shim:
    """One stage's life, from its start to its record."""

    def __init__(self, attempt: AttemptDir, job: JobDir, lock_fd: int | None) -> None:
        self.attempt = attempt
        self.job = job
        self.lock_fd = lock_fd
        self.job_id = job.path.name
        self.stop_asked: str | None = None
        self.stop_at: float | None = None
        self.grace_s = DEFAULT_GRACE_S
        self.killed = False
        self.signalled = False
        self.status: int | None = None
        self.usage: resource.struct_rusage | None = None
        self.started = (utc_now(), boottime())
        self.exit = ExitRecord(attempt.exit)

    def on_signal(self, _number: int, _frame: object) -> None:
        """SIGTERM to the shim means what cancel.json means."""
        self.signalled = True

    def describe(self, stage_pid: int | None) -> None:
        """Write process.json."""
        stage = None if stage_pid is None else {"pid": stage_pid, "start_ticks": start_ticks(stage_pid)}
        write_json(
            self.attempt.process,
            {
                "shim": {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())},
                "stage": stage,
                "boot_id": boot_id(),
                "host_id": host_id(),
                "pid_namespace": pid_namespace(),
                "started_at": self.started[0],
                "started_boottime_s": round(self.started[1], 3),
            },
        )

    def run(self) -> None:
        """Start the stage, watch it to its end, clear up behind it, and record how it ended."""
        self.describe(None)
        try:
            stage = subprocess.Popen(
                [sys.executable, "-P", "-m", "worker.run", str(self.attempt.path)],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=() if self.lock_fd is None else (self.lock_fd,),
            )
        except OSError as error:
            self.record(f"{type(error).__name__}: {error}", 0)
            return
        described = False
        descriptor = os.pidfd_open(stage.pid)
        while self.status is None:
            if not described:
                with contextlib.suppress(OSError):  # a full disk: no reason to leave the stage alone
                    self.describe(stage.pid)
                    described = True
            self.look_for_stop(stage.pid)
            select.select([descriptor], [], [], POLL_S)
            self.reap(stage.pid)
        self.record(None, self.clear_up())

    def look_for_stop(self, stage_pid: int) -> None:
        """Obey a stop that was asked for, and end the whole tree when its grace is over."""
        if self.stop_asked is None:
            order = self.order()
            if order is None and not self.signalled:
                return
            self.stop_asked = "cancel" if order is not None else "signal"
            self.grace_s = DEFAULT_GRACE_S if order is None else order
            self.stop_at = boottime()
            # Only the stage itself: it saves its work and ends its own helpers; data loaders that died first would
            # make an ordinary stop look like a crash.
            proctree.send(stage_pid, signal.SIGTERM, lambda pid: self.status is None)
        elif self.stop_at is not None and boottime() - self.stop_at >= self.grace_s:
            self.killed = True
            proctree.signal_tree(self.job_id, os.getpid(), signal.SIGKILL)

    def order(self) -> float | None:
        """The grace in cancel.json, or None while there is no such file. A broken file still is an order."""
        if not os.path.exists(self.job.cancel):  # noqa: PTH110 - Path.exists raises some errors
            return None
        try:
            return max(0.0, float(json.loads(self.job.cancel.read_bytes())["grace_s"]))
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return DEFAULT_GRACE_S

    def reap(self, stage_pid: int) -> None:
        """Collect every child that has ended: the stage, and orphans that came to us as subreaper."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == stage_pid:
                self.status, self.usage = status, usage

    def clear_up(self) -> int:
        """End what the stage left behind; returns how many processes that were."""
        left = len(proctree.tree_of(self.job_id, os.getpid()))
        deadline = boottime() + LEFT_BEHIND_GRACE_S
        number = signal.SIGKILL if self.killed else signal.SIGTERM
        while proctree.tree_of(self.job_id, os.getpid()):
            proctree.signal_tree(self.job_id, os.getpid(), number)
            select.select([], [], [], 0.02)
            self.reap(-1)
            if boottime() >= deadline:
                number = signal.SIGKILL
            if boottime() >= deadline + 5:  # a process in uninterruptible sleep must not hold the record back
                break
        return left

    def record(self, error: str | None, left_behind: int) -> None:
        """Write exit.json."""
        code = signal_name = None
        if self.status is not None:
            code = os.waitstatus_to_exitcode(self.status)
            if code < 0:
                signal_name, code = _signal_name(-code), None
        self.exit.write(
            {
                "code": code,
                "signal": signal_name,
                "error": error,
                "stop_asked": self.stop_asked,
                "killed_after_grace": self.killed,
                "left_behind": left_behind,
                "started_at": self.started[0],
                "ended_at": utc_now(),
                "seconds": round(boottime() - self.started[1], 3),
                "rusage": None if self.usage is None else _usage(self.usage),
            }
        )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _usage(usage: resource.struct_rusage) -> dict[str, float]:
    return {
        "user_s": round(usage.ru_utime, 3),
        "system_s": round(usage.ru_stime, 3),
        "max_rss_bytes": usage.ru_maxrss * 1024,
        "read_blocks": usage.ru_inblock,
        "written_blocks": usage.ru_oublock,
    }


def main(arguments: list[str]) -> None:
    """Be the shim of the attempt directory named."""
    if len(arguments) != 1:
        raise SystemExit("usage: python -P -m worker ATTEMPT_DIR")
    attempt = AttemptDir(Path(arguments[0]).absolute())
    lock_fd = os.environ.get(LOCK_FD_VARIABLE)
    # A closing terminal, or a launcher's own HUP, is no reason for the stage to end; it inherits this.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    shim = Shim(attempt, JobDir(attempt.path.parent.parent), None if lock_fd is None else int(lock_fd))
    signal.signal(signal.SIGTERM, shim.on_signal)
    shim.run()


if __name__ == "__main__":
    main(sys.argv[1:])
