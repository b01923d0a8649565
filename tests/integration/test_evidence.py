"""Killed for want of memory in a memory group of the test's own: told by the kernel's counter, not by the signal."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import DOUBLE


def own_group():
    """A memory group below the present one with 192 MB, or None where none can be made (v1 only)."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    path = next((line.split(":", 2)[2] for line in lines if line.split(":")[1] == "memory"), None)
    if path is None:
        return None
    # Not a name as jobs' groups have: shims take those away.
    group = Path("/sys/fs/cgroup/memory") / path.lstrip("/") / f"test-{os.getpid()}"
    try:
        group.mkdir(exist_ok=True)
        (group / "memory.limit_in_bytes").write_text(str(192 << 20))
    except OSError:
        return None
    return group


def test_out_of_host_memory_by_the_groups_counter(tmp_path, new_daemon, planned, wait_for):
    group = own_group()
    if group is None:
        pytest.skip("needs a memory group (cgroup v1) of one's own")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho $$ > {group}/cgroup.procs\nPYTHONPATH={DOUBLE} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    daemon = new_daemon(EYAS_WORKER_PYTHON=str(python))
    [stored] = daemon.client.submit(planned(["grab", 400]))
    job = daemon.wait_ended(stored["id"])
    record = json.loads((daemon.attempt(job["id"]) / "exit.json").read_text())
    assert (job["state"], job["reason"]) == ("failed", "out_of_host_memory"), (job, record)
    assert (record["signal"], record["oom_kills"], record["oom_group_shared"]) == ("SIGKILL", 1, False)
    assert "want of memory" in job["cause"]
    assert "num_workers" in job["hint"]
    [stored] = daemon.client.submit(planned(["kill", int(signal.SIGKILL)]))
    job = daemon.wait_ended(stored["id"])
    assert job["reason"] == "killed_by_signal"  # the counter of before is not held against it
    wait_for(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()
