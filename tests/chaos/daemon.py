"""A daemon that is killed again and again, the clock it and its jobs see, and the processes around it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from eagle3_core.contract import proctree
from eagle3_core.contract.identity import start_ticks
from eagle3_core.contract.jobdir import JOB_ID_VARIABLE

LIMIT_S = 60.0
_LIBRARIES = (
    "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1",
    "/usr/lib/aarch64-linux-gnu/faketime/libfaketimeMT.so.1",
    "/usr/lib/faketime/libfaketimeMT.so.1",
    "/usr/lib64/faketime/libfaketimeMT.so.1",
)

_MARK = f"{JOB_ID_VARIABLE}=".encode()


def until(look: Callable[[], Any], what: str, limit_s: float = LIMIT_S, step_s: float = 0.02) -> Any:
    """The first true value of `look`.

    Raises:
        TimeoutError: none came in time.
    """
    end = time.monotonic() + limit_s
    pause = threading.Event()
    while not (value := look()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not come true within {limit_s} s")
        pause.wait(step_s)
    return value


def libfaketime() -> str | None:
    """Where the library is, if it is installed."""
    return next((path for path in _LIBRARIES if Path(path).exists()), None)


class Clock:
    """The wall clock that daemon and jobs see, moved with libfaketime; the machine's own stays as it is."""

    def __init__(self, directory: Path) -> None:
        self.library = libfaketime()
        self._file = directory / "clock"
        self.jump(0)

    def jump(self, offset_s: int) -> None:
        """Set the distance from the machine's clock."""
        fresh = self._file.with_name("clock.new")
        fresh.write_text(f"{offset_s:+d}\n")
        fresh.replace(self._file)

    def tidy(self) -> None:
        """Remove what libfaketime leaves in /dev/shm for each process that is killed."""
        for path in [*Path("/dev/shm").glob("faketime_shm_*"), *Path("/dev/shm").glob("sem.faketime_sem_*")]:
            pid = path.name.rpartition("_")[2]
            if pid.isdigit() and not Path(f"/proc/{pid}").exists():
                path.unlink(missing_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        """For a process that shall see this clock. As with a real step, only CLOCK_REALTIME moves."""
        if self.library is None:
            return {}
        return {
            "LD_PRELOAD": self.library,
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": "1",  # seconds between looks at the file
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",  # 1, the default, makes threads that wait for Python's lock spin
        }


class KilledDaemon:
    """`eyas serve`, started again whenever it is needed and was killed."""

    def __init__(self, place: Path, environment: dict[str, str]) -> None:
        self.state = place / "state"
        self.log = place / "daemon.log"
        self.kills = 0
        self.short_of_disk = False
        """The next start may fail for want of room."""
        self._environment = environment
        self._place = place
        self._process: subprocess.Popen[bytes] | None = None
        self._http: httpx.Client | None = None
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        """Of the one that runs or ran last."""
        return 0 if self._process is None else self._process.pid

    def ensure(self) -> httpx.Client:
        """A client of a daemon that has just answered."""
        while True:
            if self._http is not None and self._process is not None and self._process.poll() is None:
                return self._http
            self._start()
            with contextlib.suppress(TimeoutError, httpx.TransportError):
                if until(self._answers, "a daemon that answers or is dead") == "answers":
                    continue

    def _start(self) -> None:
        self.hang_up()
        command = [sys.executable, "-P", "-m", "client.cli", "serve", "--state", str(self.state), "--port", "0"]
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._place,
                env={**os.environ, **self._environment},
            )

    def _answers(self) -> str | None:
        """`answers`, `dead`, or None while neither is known."""
        assert self._process is not None
        if (status := self._process.poll()) is not None:
            if status != -signal.SIGKILL and not self.short_of_disk:
                raise RuntimeError(f"the daemon ended with {status}; see {self.log}")
            return "dead"
        try:
            address = json.loads((self.state / "daemon.json").read_bytes())
            token = (self.state / "token").read_text().strip()
        except FileNotFoundError:
            return None
        if address["pid"] != self._process.pid:
            return None
        client = httpx.Client(
            base_url=address["url"], headers={"Authorization": f"Bearer {token}"}, timeout=30, trust_env=False
        )
        try:
            client.get("/healthz")
        except httpx.TransportError:
            client.close()
            return None
        self._http = client
        self.short_of_disk = False
        return "answers"

    def kill(self) -> None:
        """SIGKILL, if it lives."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                self._process.kill()
                self._process.wait()
                self.kills += 1

    def kill_in(self, seconds: float) -> threading.Timer:
        """Have it killed at a moment to come."""
        timer = threading.Timer(seconds, self.kill)
        timer.start()
        return timer

    def hang_up(self) -> None:
        """Close the connections."""
        if self._http is not None:
            self._http.close()
            self._http = None

    def stop(self) -> int:
        """SIGTERM; its exit status."""
        assert self._process is not None
        self.hang_up()
        self._process.terminate()
        return self._process.wait(LIMIT_S)


class Worker(NamedTuple):
    """A shim or a stage found by its mark and its command line."""

    pid: int
    job_id: str
    role: str


def carriers(jobs: set[str]) -> list[tuple[int, str]]:
    """(pid, job id) of every live process that carries the mark of one of these jobs."""
    found = []
    for pid in proctree.all_pids():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        mark = next((words[len(_MARK) :].decode() for words in environment if words.startswith(_MARK)), None)
        if mark in jobs and start_ticks(pid) is not None:
            found.append((pid, mark))
    return found


def workers(jobs: set[str]) -> list[Worker]:
    """Every live shim and stage of these jobs."""
    found = []
    for pid, job_id in carriers(jobs):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        role = "shim" if b"worker" in words else "stage" if b"worker.run" in words else None
        if role is not None:
            found.append(Worker(pid, job_id, role))
    return found


def kill_worker(worker: Worker) -> bool:
    """SIGKILL for exactly this process."""
    return proctree.send(worker.pid, signal.SIGKILL, lambda pid: proctree.carries_mark(pid, worker.job_id))


def zombies(parents: set[int]) -> set[tuple[int, int]]:
    """(pid, start ticks) of every defunct child of these processes."""
    found = set()
    for pid in proctree.all_pids():
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            continue
        fields = stat[stat.rindex(b")") + 2 :].split()
        if fields[0] == b"Z" and int(fields[1]) in parents:
            found.add((pid, int(fields[19])))
    return found
