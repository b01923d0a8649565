"""Logs as programs really leave them: torn, huge, rotated, full of carriage returns and zeros."""

import os
import resource
from pathlib import Path

import pytest

from worker import follow
from worker.follow import LogFollower


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_lines_come_once_and_whole(tmp_path: Path) -> None:
    log = tmp_path / "log"
    follower = LogFollower(log)
    assert list(follower.lines()) == []  # not there yet
    append(log, b"one\ntw")
    assert list(follower.lines()) == ["one"]
    append(log, b"o\nthr\xc3")
    assert list(follower.lines()) == ["two"]
    append(log, b"\xa9e\x1b[31mred\x1b[0m\x00 \xff\r\n")
    assert list(follower.lines()) == ["thréered \ufffd"]
    append(log, b"no end")
    assert list(follower.lines()) == []
    assert list(follower.rest()) == ["no end"]
    follower.close()


def test_it_begins_where_it_was_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    append(log, b"old\nnew\n")
    follower = LogFollower(log, 4)
    assert list(follower.lines()) == ["new"]
    follower.close()


def test_fault_15_a_storm_of_bars_costs_little_and_shows_the_last(tmp_path: Path) -> None:
    log = tmp_path / "log"
    append(log, b"".join(b"\r%3d%%|#| %d/200000" % (n // 2000, n) for n in range(200_001)))
    follower = LogFollower(log)
    shown = list(follower.lines())
    assert len(shown) <= follow.KEPT
    assert shown[-1].endswith("200000/200000")
    append(log, b"\r 1%|#| 1/9\r 2%|#| 2/9\r")
    assert list(follower.lines())[-1].endswith("2/9")  # seen although its line goes on
    append(log, b"\r 3%|#| 3/9")
    assert list(follower.lines()) == [" 3%|#| 3/9"]
    assert list(follower.lines()) == []
    assert list(follower.rest()) == []
    follower.close()


def test_fault_16_a_line_of_50_mb_takes_no_memory(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        for _ in range(50):
            file.write(b"x" * (1 << 20))
        file.write(b"\nafter\n")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    follower = LogFollower(log)
    long, after = follower.lines()
    assert (len(long), after) == (follow.MAX_LINE, "after")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10
    follower.close()


def test_what_is_too_far_behind_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "MAX_BEHIND", 1000)
    log = tmp_path / "log"
    append(log, b"old\n" * 1000 + b"new\n")
    follower = LogFollower(log)
    assert list(follower.lines())[-1] == "new"
    assert follower.skipped == 3004
    follower.close()


def test_a_log_that_was_cut_short_is_read_anew(tmp_path: Path) -> None:
    log = tmp_path / "log"
    append(log, b"before the cut\nha")
    follower = LogFollower(log, by_name=True)
    assert list(follower.lines()) == ["before the cut"]
    os.truncate(log, 0)
    append(log, b"behind\n")
    assert list(follower.lines()) == ["behind"]
    follower.close()


def test_the_hole_a_cut_leaves_is_skipped(tmp_path: Path) -> None:
    """A writer without O_APPEND goes on at its old place: terabytes of zeros, none of them on disk."""
    log = tmp_path / "log"
    append(log, b"one\n")
    follower = LogFollower(log)
    assert list(follower.lines()) == ["one"]
    os.truncate(log, 0)
    list(follower.lines())
    with log.open("r+b") as file:
        file.seek(1 << 38)
        file.write(b"\ntwo\n")
    assert [line for line in follower.lines() if line] == ["two"]
    follower.close()


def test_a_log_that_was_replaced_is_read_to_its_end_first(tmp_path: Path) -> None:
    log = tmp_path / "log"
    append(log, b"one\n")
    follower = LogFollower(log, by_name=True)
    assert list(follower.lines()) == ["one"]
    with log.open("ab") as writer:
        log.rename(tmp_path / "log.1")
        assert list(follower.lines()) == []
        writer.write(b"two\nhalf")
    append(log, b"three\n")
    assert list(follower.lines()) == ["two", "half", "three"]
    append(log, b"four\n")
    assert list(follower.lines()) == ["four"]
    follower.close()
