"""`make bench-idle`: what the daemon takes with nothing to do, and with twenty jobs that tell of progress every 2 s.

The jobs are real workers (shim and stage) whose stage does nothing but report. CPU is read from the process's own
counters, so that other work on the machine disturbs it little. The last line is one JSON object.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from client.http import EyasClient

DOUBLE = Path(__file__).resolve().parent.parent / "tests" / "integration" / "double"
PULSE_S = 2.0


@contextmanager
def daemon(place: Path, **settings: str) -> Iterator[tuple[psutil.Process, EyasClient]]:
    """A daemon over an empty state directory whose `validate` stage follows a plan; its process and a client."""
    root = place / "root"
    root.mkdir()
    python = place / "worker-python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={DOUBLE} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    environment = {**os.environ, "EYAS_WORKER_PYTHON": str(python), **settings}
    command = [sys.executable, "-P", "-m", "client.cli", "serve", "--state", str(place / "state"), "--port", "0"]
    with (place / "daemon.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=root, stdout=log, stderr=log)
    try:
        wait_until(lambda: (place / "state" / "daemon.json").exists(), 30)
        with EyasClient.of_state(place / "state") as client:
            wait_until(lambda: client.health()["status"] == "ok", 30)
            yield psutil.Process(process.pid), client
    finally:
        process.terminate()
        process.wait(30)


def wait_until(look: Callable[[], object], limit_s: float) -> None:
    """Poll until `look` answers something true."""
    end = time.monotonic() + limit_s
    while not look():
        if time.monotonic() > end:
            raise SystemExit(f"not within {limit_s} s")
        time.sleep(0.1)


def planned(root: Path, name: str, *plan: object) -> dict[str, Any]:
    """A request for a job that follows the plan."""
    directory = root / name
    directory.mkdir()
    (directory / "plan.json").write_text(json.dumps(plan))
    return {"name": name, "stage": "validate", "params": {"checkpoint": str(directory)}}


def load(process: psutil.Process, seconds: float) -> tuple[float, float]:
    """Percent of a core over so many seconds, and resident MB at their end."""
    before = process.cpu_times()
    time.sleep(seconds)
    after = process.cpu_times()
    used = after.user + after.system - before.user - before.system
    return round(100 * used / seconds, 2), round(process.memory_info().rss / 1e6, 1)


def collector(process: psutil.Process) -> psutil.Process | None:
    """The daemon's metrics collector, if it runs."""
    return next((child for child in process.children() if "collector" in " ".join(child.cmdline())), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0)
    chosen = parser.parse_args()
    found: dict[str, Any] = {"jobs": chosen.jobs, "seconds": chosen.seconds}
    with (
        tempfile.TemporaryDirectory() as place,
        daemon(Path(place), EYAS_MAX_RUNNING=str(chosen.jobs)) as (process, client),
    ):
        time.sleep(3)
        found["idle_cpu_percent"], found["idle_rss_mb"] = load(process, chosen.seconds)
        gatherer = collector(process)
        if gatherer is not None:
            found["collector_idle_cpu_percent"], found["collector_rss_mb"] = load(gatherer, chosen.seconds)
        root = Path(place) / "root"
        ids = [
            client.submit(planned(root, f"job-{number}", ["pulse", PULSE_S]))[0]["id"] for number in range(chosen.jobs)
        ]
        wait_until(lambda: all(client.job(job_id)["step"] is not None for job_id in ids), 300)
        found["busy_cpu_percent"], found["busy_rss_mb"] = load(process, chosen.seconds)
        if gatherer is not None:
            found["collector_busy_cpu_percent"], _ = load(gatherer, chosen.seconds)
        for job_id in ids:
            client.cancel(job_id, 0)
        wait_until(lambda: all(client.job(job_id)["ended_at"] for job_id in ids), 60)
    found["versions"] = {"python": platform.python_version(), "psutil": psutil.__version__}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
