"""Helpers every test may use: waiting with a limit, and a real daemon."""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest

from client.http import EyasClient
from eagle3_core.contract import proctree
from tests import forked
from tests.disks import SmallDisk, cannot_mount, own_mounts

LIMIT_S = 60.0
T = TypeVar("T")


def pytest_configure() -> None:
    own_mounts()  # before the first process is started


class WaitFor(Protocol):
    """Poll until something is true."""

    def __call__(self, look: Callable[[], T], limit_s: float = LIMIT_S, what: str = "the condition") -> T: ...


def _wait_for(look: Callable[[], T], limit_s: float = LIMIT_S, what: str = "the condition") -> T:
    """The first true value of `look`; fails when none comes in time."""
    end = time.monotonic() + limit_s
    pause = threading.Event()
    while True:
        value = look()
        if value:
            return value
        if time.monotonic() > end:
            pytest.fail(f"{what} did not come true within {limit_s} s; last value {value!r}")
        pause.wait(0.02)


@pytest.fixture(scope="session")
def wait_for() -> WaitFor:
    return _wait_for


class Daemon:
    """A real `eyas serve` on a free port. `root` is where jobs may read and write."""

    program: tuple[str, ...] = ("client.cli",)
    """What is started, and what it is told before `serve`."""

    def __init__(self, state: Path, root: Path, environment: dict[str, str]) -> None:
        self.state = state
        self.root = root
        self._environment = environment
        self._process: ForkServerProcess | None = None
        self._client: EyasClient | None = None
        self.output = b""

    @property
    def pid(self) -> int:
        assert self._process is not None and self._process.pid is not None
        return self._process.pid

    @property
    def client(self) -> EyasClient:
        assert self._client is not None
        return self._client

    @property
    def login_link(self) -> str:
        found = re.search(rb"http://\S+/login\?code=\S+", self.output)
        assert found is not None
        return found.group().decode()

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-P", "-m", "client.cli", *arguments]

    def start(self) -> "Daemon":
        log = self.root / "daemon.log"
        begin = log.stat().st_size if log.exists() else 0
        log.touch()
        program, *told = self.program
        arguments = [*told, "serve", "--state", str(self.state), "--port", "0"]
        self._process = forked.start(program, arguments, {**os.environ, **self._environment}, self.root, log)

        def announced() -> bool:
            assert self._process is not None
            self.output = log.read_bytes()[begin:]
            assert self._process.is_alive(), self.output.decode()
            return b"  roots  " in self.output

        _wait_for(announced, what="the daemon's address")
        self._client = EyasClient.of_state(self.state)
        _wait_for(lambda: self.client.health()["status"] == "ok", what="health")
        return self

    def kill(self) -> None:
        """SIGKILL: no goodbye."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM; its exit status."""
        return self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> int:
        assert self._process is not None
        if self._client is not None:
            self._client.close()
            self._client = None
        if number == signal.SIGKILL:
            self._process.kill()
        else:
            self._process.terminate()
        self._process.join(LIMIT_S)
        assert self._process.exitcode is not None, f"the daemon did not end within {LIMIT_S} s"
        return self._process.exitcode

    def end_jobs(self) -> None:
        """Have every job end that has not."""

        def left() -> list[Any]:
            return self.client.jobs(state=("queued", "starting", "running", "stopping", "paused"))

        for job in left():
            self.client.cancel(job["id"], grace_s=0)
        _wait_for(lambda: not left(), what="the end of all jobs")

    def close(self) -> None:
        if self._process is not None and self._process.is_alive():
            self.kill()
        jobs = self.state / "jobs"
        for job in jobs.iterdir() if jobs.exists() else ():
            proctree.signal_tree(job.name, None, signal.SIGKILL)

    def attempt(self, job_id: str, number: int = 1) -> Path:
        return self.state / "jobs" / job_id / "attempts" / str(number)

    def wait_state(self, job_id: str, *states: str, limit_s: float = LIMIT_S) -> dict[str, Any]:
        """The job once it is in one of the states."""

        def reached() -> dict[str, Any] | None:
            job = dict(self.client.job(job_id))
            return job if job["state"] in states else None

        job = _wait_for(reached, limit_s, f"{job_id} in {states}")
        assert job is not None
        return job

    def wait_ended(self, job_id: str, limit_s: float = LIMIT_S) -> dict[str, Any]:
        return self.wait_state(job_id, "succeeded", "failed", "cancelled", limit_s=limit_s)

    def file_events(self, job_id: str) -> list[dict[str, Any]]:
        """The events as the stage wrote them."""
        found = []
        for attempt in sorted((self.state / "jobs" / job_id / "attempts").iterdir(), key=lambda path: int(path.name)):
            if (attempt / "events.jsonl").exists():
                found += [json.loads(line) for line in (attempt / "events.jsonl").read_bytes().splitlines()]
        return found


@pytest.fixture
def code_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where transformers puts the Python it runs for a verifier, for this test alone."""
    from transformers import dynamic_module_utils  # noqa: PLC0415 - few tests need it, and it takes seconds

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
            del sys.modules[name]

    path = tmp_path / "modules"
    elsewhere = dynamic_module_utils.HF_MODULES_CACHE  # from where the package would be taken, once it is there
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(path))
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != elsewhere])
    forget()
    yield path
    forget()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[..., SmallDisk]]:
    """Makes file systems of a few megabytes: `small_disk(8 << 20)`."""
    with ExitStack() as mounted:

        def make(size: int, name: str = "disk") -> SmallDisk:
            (tmp_path / name).mkdir()
            if fault := cannot_mount(tmp_path / name, size):
                pytest.skip(fault)
            disk = SmallDisk(tmp_path / name)
            mounted.callback(disk.close)
            return disk

        yield make


@pytest.fixture(scope="session")
def daemon_class() -> type[Daemon]:
    return Daemon


@pytest.fixture
def new_daemon(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Starts daemons; `new_daemon(EYAS_MAX_RUNNING="2")` sets variables."""
    made: list[Daemon] = []

    def make(**environment: str) -> Daemon:
        root = tmp_path / "root"
        root.mkdir(exist_ok=True)
        made.append(Daemon(tmp_path / "state", root, environment))
        return made[-1].start()

    yield make
    for daemon in made:
        daemon.close()
