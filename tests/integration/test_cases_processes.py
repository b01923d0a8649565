"""Generators of public bug reports about process control, through the real daemon."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.cases import make_case


def test_case_i01_no_pid_file_keeps_the_daemon_from_starting(new_daemon, tmp_path: Path) -> None:
    """Whatever stands where the daemon tells its pid: it asks a lock, not a number, and signals nobody."""
    files = sorted((make_case("I01", tmp_path) / "run").iterdir())
    assert len(files) >= 6
    daemon = new_daemon()
    for file in files:
        daemon.kill()
        shutil.copy(file, daemon.state / "daemon.json")
        daemon.start()
        assert daemon.client.health()["status"] == "ok", file.name


def test_case_i07_a_held_database_loses_no_state_change(planned, planned_daemon, wait_for, tmp_path: Path) -> None:
    """Another process keeps the write lock while a job ends and another one is submitted."""
    text = (make_case("I07", tmp_path) / "hold_lock.py").read_text()
    assert "jobs.db" in text
    daemon, gate = planned_daemon(), tmp_path / "gate"
    [running] = daemon.client.submit(planned(["stream", str(gate)]))
    wait_for(lambda: daemon.client.job(running["id"])["step"])
    holder = daemon.state / "hold_lock.py"
    holder.write_text(text.replace("jobs.db", "eyas.db"))
    with subprocess.Popen([sys.executable, holder, "2"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        gate.touch()
        [late] = daemon.client.submit(planned(name="late"))
    for job in (running, late):
        assert daemon.wait_ended(job["id"])["state"] == "succeeded"
    assert list(daemon.client.events(running["id"])) == daemon.file_events(running["id"])
