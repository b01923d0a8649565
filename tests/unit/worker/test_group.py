"""The job's control group: a net for processes that shed every other mark."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_core.contract import proctree
from worker.group import JobGroup

WAITS = [sys.executable, "-c", "import sys; sys.stdin.read()"]


def test_a_process_without_the_mark_is_found_by_its_group():
    group = JobGroup("test-group-1")
    if group.path is None:
        pytest.skip("needs the right to make a control group")
    with subprocess.Popen(WAITS, stdin=subprocess.PIPE, env={}, start_new_session=True) as process:
        assert proctree.marked("test-group-1") == []
        group.take(process.pid)
        assert proctree.marked("test-group-1") == [process.pid]
        assert proctree.marked("test-group") == []
        group.remove()
        assert group.path.is_dir()
        proctree.signal_tree("test-group-1", None, signal.SIGKILL)
    group.remove()
    assert not group.path.exists()


def test_a_group_that_was_swept_away_is_made_again():
    group = JobGroup("test-group-2")
    if group.path is None:
        pytest.skip("needs the right to make a control group")
    JobGroup("test-group-3").remove()
    assert not group.path.exists()
    with subprocess.Popen(WAITS, stdin=subprocess.PIPE, env={}) as process:
        group.take(process.pid)
        assert proctree.marked("test-group-2") == [process.pid]
    group.remove()


def test_where_no_group_can_be_made_there_is_none(tmp_path: Path):
    group = JobGroup("x", [tmp_path])
    group.take(1)
    group.remove()
    assert (group.path, group.counter, list(tmp_path.iterdir())) == (None, None, [])
