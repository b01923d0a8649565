"""A real GPU: its driver's own tool says whether there is one."""

import csv
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Planner, worker_python

NVIDIA_SMI = shutil.which("nvidia-smi")
FIELDS = "index,uuid,name,memory.total,memory.used,temperature.gpu,power.draw,utilization.gpu"


def ask_nvidia_smi() -> list[dict[str, str]]:
    """A row for each GPU, numbers without units."""
    assert NVIDIA_SMI is not None
    command = [NVIDIA_SMI, f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    return [
        dict(zip(FIELDS.split(","), (cell.strip() for cell in row), strict=True))
        for row in csv.reader(text.splitlines())
    ]


@pytest.fixture(scope="session")
def cards() -> list[dict[str, str]]:
    """What nvidia-smi shows; skips the test on a machine without a GPU."""
    if NVIDIA_SMI is None:
        pytest.skip("no nvidia-smi: this machine has no NVIDIA GPU")
    try:
        found = ask_nvidia_smi()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"nvidia-smi fails: {error.stdout.strip()}")
    return found or pytest.skip("nvidia-smi shows no GPU")


@pytest.fixture
def gpu_daemon(new_daemon: Callable[..., Any], wait_for: Any) -> Callable[..., Any]:
    """Starts a daemon with the real stages, and has it look at the GPUs."""

    def make(**environment: str) -> Any:
        daemon = new_daemon(**environment)
        wait_for(lambda: daemon.client.gpus()["gpus"], limit_s=60, what="the GPUs")
        return daemon

    return make


@pytest.fixture
def planned_gpu_daemon(gpu_daemon: Callable[..., Any], tmp_path: Path) -> tuple[Any, Planner]:
    """The same with stages that follow a plan."""
    (tmp_path / "root").mkdir(exist_ok=True)
    return gpu_daemon(**worker_python(tmp_path)), Planner(tmp_path / "root")
