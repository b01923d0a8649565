"""The shim: the stage's parent, and the only one who can learn its exit code. Standard library only.

    daemon --spawns--> shim (python -P -m worker ATTEMPT_DIR) --spawns--> stage (python -P -m worker.run ATTEMPT_DIR)

It needs no daemon: whoever writes cancel.json, pause.json or stop.json into control/ has the stage stopped, and so does
the time limit. It makes process.json before the stage exists (from then on the attempt counts as begun), and exit.json
when stage and everything it left behind are gone.
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
from eagle3_core.contract.exits import DEFAULT_GRACE_S, ExitCode
from eagle3_core.contract.identity import boot_id, host_id, pid_namespace, start_ticks
from eagle3_core.contract.jobdir import (
    LOCK_FD_VARIABLE,
    MAX_SECONDS_VARIABLE,
    AttemptDir,
    JobDir,
    fsync_directory,
    is_full,
    write_json,
)
from worker import stacks
from worker.evidence import KernelLog, oom_counter, oom_kills, others_in_group, shared_memory_free
from worker.group import JobGroup

PR_SET_CHILD_SUBREAPER = 36
CANCEL = "cancel"
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

    def __init__(self, attempt: AttemptDir, job: JobDir, lock_fd: int | None, max_seconds: float | None = None) -> None:
        self.attempt = attempt
        self.job = job
        self.lock_fd = lock_fd
        self.job_id = job.path.name
        self.max_seconds = max_seconds
        self.stop_asked: str | None = None
        self.kill_at: dict[str, tuple[float, float]] = {}
        self.killed = False
        self.signalled = False
        self.status: int | None = None
        self.usage: resource.struct_rusage | None = None
        self.started = (utc_now(), boottime())
        self.exit = ExitRecord(attempt.exit)
        self.stack_taken: object = None
        self.group = JobGroup(self.job_id)
        self.counter = self.group.counter or oom_counter()
        self.oom_kills_before = oom_kills(self.counter)
        self.kernel_log = KernelLog()
        self.shm_free: tuple[int, int] | None = None
        self.shm_before: tuple[int, int] | None = None

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
        self.group.take(stage.pid)
        described = False
        descriptor = os.pidfd_open(stage.pid)
        while self.status is None:
            if not described:
                with contextlib.suppress(OSError):  # a full disk: no reason to leave the stage alone
                    self.describe(stage.pid)
                    described = True
            self.look_for_stack(stage.pid)
            self.look_for_stop(stage.pid)
            select.select([descriptor], [], [], POLL_S)
            self.look_at_shared_memory()
            self.reap(stage.pid)
        evidence = self.evidence(stage.pid)
        left_behind = self.clear_up()
        self.group.remove()
        self.record(None, left_behind, evidence)

    def look_at_shared_memory(self) -> None:
        """Keep the scarcer of the last two looks: what a dead process held is free again."""
        now = shared_memory_free()
        if now is not None:
            self.shm_free = now if self.shm_before is None else min(now, self.shm_before)
        self.shm_before = now

    def evidence(self, stage_pid: int) -> dict[str, Any]:
        """What the system says of the end, read before anything is cleared away."""
        killed = self.status is not None and os.waitstatus_to_exitcode(self.status) == -signal.SIGKILL
        after = oom_kills(self.counter)
        before = self.oom_kills_before
        tree = proctree.tree_of(self.job_id, os.getpid())
        return {
            "oom_kills": None if before is None or after is None else after - before,
            "oom_group_shared": others_in_group(self.counter, {os.getpid(), *tree}),
            "kernel_log": self.kernel_log.kill_of(stage_pid) if killed and not self.killed else None,
            "shm_free_bytes": None if self.shm_free is None else self.shm_free[0],
            "shm_total_bytes": None if self.shm_free is None else self.shm_free[1],
        }

    def look_for_stack(self, stage_pid: int) -> None:
        """Take the stacks once for each id asked for."""
        asked = read_order(self.job.stack).get("id")
        if asked is None or asked == self.stack_taken:
            return
        self.stack_taken = asked
        pids = proctree.tree_of(self.job_id, os.getpid())
        with contextlib.suppress(OSError):
            stacks.take(stage_pid, pids, self.attempt.stacks, str(asked)[:100], utc_now())

    def look_for_stop(self, stage_pid: int) -> None:
        """Obey a stop that was asked for, and end the whole tree when the shortest grace given is over."""
        now = boottime()
        for why, grace_s in self.orders(now):
            since, _ = self.kill_at.get(why, (now, grace_s))
            self.kill_at[why] = (since, grace_s)
            if self.stop_asked is None:
                # Only the stage itself: it saves its work and ends its own helpers; data loaders that died first
                # would make an ordinary stop look like a crash.
                proctree.send(stage_pid, signal.SIGTERM, lambda pid: self.status is None)
            if self.stop_asked is None or why == CANCEL:
                self.stop_asked = why
        if any(now - since >= grace_s for since, grace_s in self.kill_at.values()):
            self.killed = True
            proctree.signal_tree(self.job_id, os.getpid(), signal.SIGKILL)

    def orders(self, now: float) -> list[tuple[str, float]]:
        """(what for, grace) of every stop that is asked for; a cancel comes first."""
        found = [(CANCEL, _grace(read_order(self.job.cancel)))] if exists(self.job.cancel) else []
        by_policy = read_order(self.job.stop)
        if "reason" in by_policy:
            found.append((str(by_policy["reason"]), _grace(by_policy)))
        elif self.max_seconds is not None and now - self.started[1] >= self.max_seconds:
            found.append(("time_limit", DEFAULT_GRACE_S))
        if exists(self.job.pause):
            found.append(("pause", _grace(read_order(self.job.pause))))
        if self.signalled:
            found.append(("signal", DEFAULT_GRACE_S))
        return found

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

    def record(self, error: str | None, left_behind: int, evidence: dict[str, Any] | None = None) -> None:
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
                **(evidence or {}),
            }
        )


def exists(path: Path) -> bool:
    """Whether there is such a file; trouble with looking means no."""
    return os.path.exists(path)  # noqa: PTH110 - Path.exists raises some errors


def read_order(path: Path) -> dict[str, Any]:
    """What a command file says; a broken one still is a command, and says nothing more."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _grace(order: dict[str, Any]) -> float:
    try:
        return max(0.0, float(order["grace_s"]))
    except (ValueError, KeyError, TypeError, OverflowError):
        return DEFAULT_GRACE_S


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
    limit = os.environ.get(MAX_SECONDS_VARIABLE)
    try:
        shim = Shim(
            attempt,
            JobDir(attempt.path.parent.parent),
            None if lock_fd is None else int(lock_fd),
            None if limit is None else float(limit),
        )
        signal.signal(signal.SIGTERM, shim.on_signal)
        shim.run()
    except OSError as error:
        # Without process.json no stage was started, so that the daemon may try again once there is room.
        if not is_full(error) or exists(attempt.process):
            raise
        raise SystemExit(ExitCode.DISK_FULL) from error


if __name__ == "__main__":
    main(sys.argv[1:])
