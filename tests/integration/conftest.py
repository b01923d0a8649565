"""A daemon whose `validate` stage follows a plan, so that every end can be had in a fraction of a second."""

import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.nvml.fake import FakeNvml, compile_library

DOUBLE = Path(__file__).parent / "double"
ROOT = Path(__file__).parents[2]


class Planner:
    """Makes requests for jobs that do exactly this or that."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._numbers: Iterator[int] = itertools.count(1)

    def __call__(
        self, *plan: list[Any], name: str = "planned", depends_on: list[str] | None = None, **fields: Any
    ) -> dict[str, Any]:
        """A request; no end is tried again unless `retry` is among the further fields."""
        directory = self._root / f"plan-{next(self._numbers)}"
        directory.mkdir()
        (directory / "plan.json").write_text(json.dumps(plan))
        return {
            "name": name,
            "stage": "validate",
            "params": {"checkpoint": str(directory)},
            "depends_on": depends_on or [],
            "retry": {"max_retries": 0},
            **fields,
        }


@pytest.fixture
def planned(tmp_path: Path) -> Planner:
    (tmp_path / "root").mkdir(exist_ok=True)
    return Planner(tmp_path / "root")


def worker_python(directory: Path) -> dict[str, str]:
    """The setting that puts the planned stage in place."""
    python = directory / "worker-python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={DOUBLE}:{ROOT} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return {"EYAS_WORKER_PYTHON": str(python)}


@pytest.fixture
def planned_daemon(tmp_path: Path, new_daemon: Callable[..., Any]) -> Callable[..., Any]:
    """Starts a daemon of the test's own."""

    def make(**environment: str) -> Any:
        return new_daemon(**worker_python(tmp_path), **environment)

    return make


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, daemon_class: Any) -> Iterator[tuple[Any, Planner]]:
    """One daemon for the tests that leave it as they found it, and its planner."""
    place = tmp_path_factory.mktemp("shared")
    root = place / "root"
    root.mkdir()
    daemon = daemon_class(place / "state", root, worker_python(place)).start()
    yield daemon, Planner(root)
    daemon.close()


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture(autouse=True)
def _a_failed_test_leaves_no_job(request: pytest.FixtureRequest, daemon_class: Any) -> Iterator[None]:
    """Its jobs would hold the slots of a daemon that others share, and those would fail too."""
    yield
    if request.node.stash.get(FAILED, False):
        for value in request.node.funcargs.values():
            daemon = value[0] if isinstance(value, tuple) and value else value
            if isinstance(daemon, daemon_class):
                daemon.end_jobs()


def open_files(pid: int) -> list[str]:
    """What a process has open; a file it closes meanwhile may be among them or not."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(link.readlink()))
    return found


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the fake library."""
    directory = tmp_path_factory.mktemp("nvml")
    compile_library(directory)
    return directory


@pytest.fixture
def nvml(nvml_library: Path, tmp_path: Path) -> FakeNvml:
    """Eight fake GPUs of the test's own."""
    return FakeNvml(nvml_library, tmp_path / "gpus")


@pytest.fixture
def gpu_daemon(planned_daemon: Callable[..., Any], nvml: FakeNvml, wait_for: Any) -> Callable[..., Any]:
    """Starts a daemon that sees the fake GPUs, and has seen them."""

    def make(**environment: str) -> Any:
        daemon = planned_daemon(**nvml.environment, **environment)
        wait_for(lambda: daemon.client.gpus()["time"], what="a first look at the GPUs")
        return daemon

    return make
