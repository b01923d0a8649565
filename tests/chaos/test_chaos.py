"""A few rounds of `make chaos`; the long form bears the marker."""

import os
import shutil

import pytest

from tests.chaos.daemon import libfaketime
from tests.chaos.run import run


def check(place, rounds, at_least):
    seed = 20_251_129
    figures, faults = run(place, rounds, seed)
    assert faults == [], (seed, figures)
    done = ["daemon_kills", "shim_kills", "stage_kills"] + ["clock_jumps"] * (libfaketime() is not None)
    done += ["disk_full"] * (os.geteuid() == 0)
    done += ["nvml_failures", "jobs_on_gpus"] * (shutil.which("cc") is not None)
    assert all(figures[name] >= at_least for name in done), figures
    assert figures["jobs"] >= 2 * rounds
    return figures


def test_eight_rounds_of_kills_lose_nothing_and_double_nothing(tmp_path):
    place = tmp_path / "chaos"
    place.mkdir()
    check(place, 8, 1)


@pytest.mark.chaos
def test_two_hundred_rounds(tmp_path):
    place = tmp_path / "chaos"
    place.mkdir()
    assert check(place, 200, 20)["jobs"] >= 400
