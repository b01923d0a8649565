"""What is in docker/: the entry point keeps the container alive when the daemon dies, and the unit keeps the jobs."""

import configparser
import os
import signal
import subprocess
from pathlib import Path

import pytest

DOCKER = Path(__file__).resolve().parents[2] / "docker"


@pytest.fixture
def keep_serving(tmp_path):
    """Starts the entry point over a program called `eyas` that notes its pid, its arguments, and does as told."""
    started = []

    def make(body):
        program = tmp_path / "eyas"
        program.write_text(f'#!/bin/sh\necho "$$ $*" >> {tmp_path}/starts\n{body}\n')
        program.chmod(0o755)
        process = subprocess.Popen(
            [DOCKER / "keep-serving", "--port", "9"],
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
            stderr=subprocess.DEVNULL,
        )
        started.append(process)
        return process

    def starts():
        file = tmp_path / "starts"
        return file.read_text().splitlines() if file.exists() else []

    yield make, starts
    for process in started:
        process.kill()
        process.wait()


def test_a_daemon_that_dies_is_started_again_and_a_stop_ends_both(keep_serving, wait_for):
    make, starts = keep_serving
    process = make("exec tail -f /dev/null")
    wait_for(lambda: len(starts()) == 1)
    assert starts()[0].endswith(" serve --port 9")
    os.kill(int(starts()[0].split()[0]), signal.SIGKILL)
    wait_for(lambda: len(starts()) == 2)
    process.terminate()
    assert process.wait(60) == 0
    assert not Path(f"/proc/{starts()[1].split()[0]}").exists()


def test_a_daemon_that_cannot_start_ends_the_container(keep_serving):
    make, starts = keep_serving
    assert make("exit 1").wait(60) == 1
    assert len(starts()) == 1


def test_the_unit_stops_the_daemon_alone():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(DOCKER / "eyas.service")
    assert unit["Service"]["KillMode"] == "process"
    assert unit["Service"]["Restart"] == "always"
