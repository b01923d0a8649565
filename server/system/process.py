"""Starting shims, and signalling what has lost its shim."""

import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_core.contract import proctree
from eagle3_core.contract.identity import ProcessIdentity, boot_id, host_id, is_alive
from eagle3_core.contract.jobdir import read_json
from server.system.descriptors import give_first_limit


@dataclass(frozen=True)
class ProcessRecord:
    """process.json: who shim and stage are. `stage` is None until it was started, both are in a damaged file."""

    shim: ProcessIdentity | None
    stage: ProcessIdentity | None
    host: str
    started_boottime_s: float

    @property
    def here(self) -> bool:
        """Whether this host wrote it, so that its pids and boot id can be judged here."""
        return self.host == host_id()

    @property
    def rebooted(self) -> bool:
        """Whether this host was started again since."""
        return self.here and self.shim is not None and self.shim.boot_id != boot_id()

    @property
    def shim_lives(self) -> bool:
        """Whether the shim runs; taken for granted where it cannot be judged."""
        return not self.here or self.shim is None or is_alive(self.shim)


def read_process(path: Path) -> ProcessRecord | None:
    """The record in a file, or None while there is none. A damaged one still says that the attempt began."""
    try:
        found: dict[str, Any] | None = read_json(path)
        return None if found is None else _record(found)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ProcessRecord(None, None, host_id(), 0.0)


def _record(found: dict[str, Any]) -> ProcessRecord:
    def identity(value: dict[str, int | None] | None) -> ProcessIdentity | None:
        return None if value is None else ProcessIdentity(int(value["pid"] or 0), int(value["start_ticks"] or 0), boot)

    boot = str(found["boot_id"])
    shim, stage = identity(found["shim"]), identity(found["stage"])
    return ProcessRecord(shim, stage, str(found["host_id"]), float(found["started_boottime_s"]))


class Child:
    """A shim this very daemon started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Its pid."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Its exit code (negative: the signal), collected so that no zombie stays; None while it lives."""
        return self._process.poll()


def spawn(python: Path, attempt: Path, log: Path, lock_fd: int, environment: dict[str, str]) -> Child:
    """Start the shim of an attempt in a session of its own, its output going straight into the log.

    Raises:
        OSError: the interpreter or the log cannot be opened.
    """
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        shim = subprocess.Popen(
            [str(python), "-P", "-m", "worker", str(attempt)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=attempt,
            env=environment,
            start_new_session=True,
            pass_fds=(lock_fd,),
        )
        give_first_limit(shim.pid)
        return Child(shim)
    finally:
        os.close(output)


def terminate(process: ProcessIdentity | None, job_id: str) -> None:
    """SIGTERM for exactly this process; where it is not known, for every one that carries the job's mark."""
    if process is None:
        proctree.signal_tree(job_id, None, signal.SIGTERM)
    else:
        proctree.send(process.pid, signal.SIGTERM, lambda _pid: is_alive(process))


def kill_marked(job_id: str) -> int:
    """SIGKILL for every process that carries the job's mark; returns how many there were."""
    return proctree.signal_tree(job_id, None, signal.SIGKILL)


def any_marked(job_id: str) -> bool:
    """Whether a process that carries the job's mark lives."""
    return bool(proctree.marked(job_id))
