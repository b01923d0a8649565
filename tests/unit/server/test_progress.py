"""Events add up to a status."""

import errno
import json
import os
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_core.contract.events import EventWriter
from eagle3_core.contract.jobdir import MAX_LINE_BYTES, complete_lines
from server.domain.progress import (
    MAX_EVENT_BYTES,
    MAX_WARNINGS,
    Status,
    add_warning,
    begin_attempt,
    end_attempt,
    fold,
    read_line,
)

TIME = datetime(2026, 1, 1, tzinfo=UTC)


def event(seq, kind, boottime=None, **fields):
    line = {"seq": seq, "time": "2026-01-01T00:00:00Z", "boottime_s": boottime or float(seq), "type": kind, **fields}
    read = read_line(json.dumps(line).encode())
    assert read is not None
    return read[0]


def test_elapsed_and_eta_are_as_of_the_last_event():
    status = begin_attempt(Status(), 100.0)
    status = fold(status, event(1, "progress", 110.0, step=10, steps=100))
    assert (status.elapsed_s, status.eta_s) == (10.0, None)
    status = fold(status, event(2, "progress", 120.0, step=20, steps=100))
    assert (status.elapsed_s, status.eta_s) == (20.0, 80.0)
    status = fold(status, event(3, "heartbeat", 125.0))
    assert (status.elapsed_s, status.eta_s) == (25.0, 80.0)
    status = fold(status, event(4, "progress", 130.0, step=21, steps=100, eta_s=7.0))
    assert status.eta_s == 7.0
    ended = end_attempt(status, 31.5)
    assert (ended.elapsed_s, ended.eta_s) == (31.5, None)
    again = fold(begin_attempt(ended, 5.0), event(5, "heartbeat", 6.0))
    assert again.elapsed_s == 32.5


def test_a_value_left_out_keeps_its_last_one_and_a_nan_shows_as_null():
    status = fold(Status(), event(1, "progress", step=1, steps=4, epoch=0, epochs=2, loss=2.0, lr=0.1))
    status = fold(status, event(2, "progress", step=2, steps=4))
    assert (status.loss, status.lr, status.epoch) == (2.0, 0.1, 0)
    status = fold(status, event(3, "progress", step=3, steps=4, loss=float("nan")))
    assert status.loss is None


def test_an_epoch_done_again_replaces_the_first():
    done = {"epoch": 0, "epochs": 2, "train_s": 1.0, "val_s": 0.5, "train": {"loss": 3.0}, "val": None}
    status = fold(Status(), event(1, "epoch", **done))
    status = fold(status, event(2, "epoch", **{**done, "train_s": 2.0}))
    assert [one.train_s for one in status.epochs_done] == [2.0]


def test_a_late_verdict_on_an_older_checkpoint_leaves_the_newest():
    status = fold(Status(), event(1, "checkpoint", path="/c/0", epoch=0, step=1, bytes=1))
    status = fold(status, event(2, "checkpoint", path="/c/1", epoch=1, step=2, bytes=1))
    status = fold(status, event(3, "verdict", path="/c/0", verdict="valid", findings=[], seconds=1))
    assert (status.last_checkpoint.path, status.last_checkpoint.verdict) == ("/c/1", None)
    status = fold(status, event(4, "verdict", path="/c/1", verdict="suspect", findings=[], seconds=1))
    assert status.last_checkpoint.verdict == "suspect"


def test_a_verdict_says_why_in_the_words_of_the_gravest_finding():
    found = [
        {"severity": "error", "message": "fc.weight holds NaN"},
        {"severity": "warning", "message": "lm_head.weight has rows that repeat another"},
        {"severity": "info", "message": "read as speculators"},
    ]

    def why(findings):
        told = event(1, "verdict", path="/c/0", verdict="invalid", findings=findings, seconds=1)
        return fold(Status(), told).last_checkpoint.why

    assert why(found) == "fc.weight holds NaN (and 1 more)"
    assert why(found[1:]) == "lm_head.weight has rows that repeat another"
    assert why(found[2:]) is None
    assert why([{}]) is None


def test_warnings_are_counted_and_bounded():
    status = Status()
    for number in range(MAX_WARNINGS + 7):
        status = add_warning(status, "many", f"number {number}", TIME)
    status = add_warning(status, "many", "number 3", TIME)
    assert len(status.warnings) == MAX_WARNINGS
    assert status.warnings[3].count == 2
    assert status.warnings_left_out == 7


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"null", b"[]", b"{}", b'{"seq": 1}', b"\xff\xfe", b'{"seq": 1, "type": "heartbeat"}',
     b'{"seq": 0, "time": "2026-01-01T00:00:00Z", "boottime_s": 1, "type": "heartbeat"}',
     b'{"seq": 1, "time": "2026-01-01T00:00:00Z", "boottime_s": 1e999, "type": "heartbeat"}',
     b'{"seq": 1, "time": "2026-01-01T00:00:00Z", "boottime_s": 1, "type": "unheard"}', b"[" * 100_000],
)  # fmt: skip
def test_lines_that_are_no_events(line):
    assert read_line(line) is None


@given(st.binary(max_size=200))
def test_no_line_raises(line):
    read_line(line)


@given(
    st.dictionaries(st.text(max_size=5), st.floats() | st.integers() | st.text() | st.none() | st.lists(st.floats())),
    st.floats(),
)
def test_what_the_writer_writes_is_read_back_as_json(tmp_path_factory, data, loss):
    path = tmp_path_factory.mktemp("events") / "events.jsonl"
    writer = EventWriter(path)
    writer.write("result", data=data, artifacts={})
    writer.write("progress", step=1, steps=2, loss=loss)
    writer.close()
    for line in path.read_bytes().splitlines():
        read = read_line(line)
        assert read is not None
        assert json.loads(read[1]) == json.loads(line)
        Status.model_validate_json(fold(Status(), read[0]).model_dump_json())


def test_a_line_larger_than_any_event_is_none_and_a_long_warning_is_cut():
    line = {
        "seq": 1,
        "time": "2026-01-01T00:00:00Z",
        "boottime_s": 1.0,
        "type": "phase",
        "phase": "x" * MAX_EVENT_BYTES,
    }
    assert read_line(json.dumps(line).encode()) is None
    [warning] = add_warning(Status(), "code", "y" * 10_000, TIME).warnings
    assert len(warning.message) == 2000


def test_a_line_without_an_end_is_read_in_pieces(tmp_path):
    file = tmp_path / "events.jsonl"
    with file.open("wb") as events:
        events.truncate(MAX_LINE_BYTES + 5)
        events.seek(0, 2)
        events.write(b"\n{}\n")
    [(end, piece)] = complete_lines(file, 0)
    assert end == len(piece) == MAX_LINE_BYTES
    assert complete_lines(file, end) == [(end + 6, b"\0" * 5), (end + 9, b"{}")]


def test_an_event_that_a_full_disk_took_half_of_is_written_once_there_is_room(tmp_path, monkeypatch):
    file = tmp_path / "events.jsonl"
    writer = EventWriter(file)
    writer.write("heartbeat")
    whole = os.write

    def half(descriptor, data):
        whole(descriptor, data[:7])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("eagle3_core.contract.events.os.write", half)
    writer.write("phase", phase="while the disk is full")
    with pytest.raises(OSError, match=r"No space left on device: '.*events\.jsonl'"):
        writer.flush()
    assert len(file.read_bytes().splitlines()) == 1
    monkeypatch.undo()
    writer.write("heartbeat")
    writer.close()
    told = [json.loads(line) for line in file.read_bytes().splitlines()]
    assert [event["seq"] for event in told] == [1, 2, 3]
    assert told[1]["phase"] == "while the disk is full"


def test_progress_of_a_program_that_tells_neither_step_nor_steps():
    status = fold(Status(), event(1, "progress", step=16, steps=16))
    status = fold(status, event(2, "progress", step=2, steps=None, epoch=0, epochs=3, loss=2.5))
    assert (status.step, status.steps, status.eta_s) == (2, None, None)
    status = fold(status, event(3, "progress", step=6, steps=12))
    assert (status.step, status.steps, status.eta_s) == (6, 12, 1.5)
    assert fold(status, event(4, "progress", epoch=1)).step == 6
