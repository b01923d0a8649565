"""Small parts of the API: ranges, cursors, references, the state of a pipeline, documents, faults."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.domain.listing import cursor_before, number_of_cursor
from server.domain.ranges import Span, Unsatisfiable, span_of
from server.domain.references import BadReference, filled_in, references_in
from server.domain.states import JobState
from server.errors import Unreadable
from server.services.documents import read_yaml
from server.services.pipelines import pipeline_state

S = JobState


@pytest.mark.parametrize(
    ("header", "span"),
    [
        (None, None), ("bytes=0-0", Span(0, 1)), ("bytes=2-", Span(2, 8)), ("bytes=-3", Span(7, 3)),
        ("bytes=-99", Span(0, 10)), ("bytes=5-99", Span(5, 5)),
        ("bytes=5-18446744073709551615", Span(5, 5)), ("bytes=5-4", None), ("bytes=-", None),
        ("bytes=0-1,3-4", None), ("items=0-1", None), ("bytes=x-y", None), ("bytes=" + "9" * 400 + "-", None),
    ],
)  # fmt: skip
def test_one_part_of_a_file(header, span):
    assert span_of(header, 10) == span


@pytest.mark.parametrize(("header", "size"), [("bytes=10-", 10), ("bytes=0-", 0), ("bytes=-0", 10), ("bytes=-1", 0)])
def test_a_part_behind_the_end(header, size):
    with pytest.raises(Unsatisfiable):
        span_of(header, size)


@given(st.text(max_size=80))
def test_no_range_goes_beyond_the_file(text):
    try:
        span = span_of("bytes=" + text, 1000)
    except Unsatisfiable:
        return
    assert span is None or (span.length > 0 and 0 <= span.start <= span.start + span.length <= 1000)


@given(st.integers(0, 10**17))
def test_a_cursor_says_its_number(number):
    assert number_of_cursor(cursor_before(number)) == number


@given(st.text(max_size=64))
def test_what_is_no_cursor_is_told(text):
    try:
        number = number_of_cursor(text)
    except ValueError:
        return
    assert cursor_before(number) == text.rstrip("=") or number_of_cursor(cursor_before(number)) == number


def test_references_are_filled_in_anywhere_and_escaped():
    value = {"a": ["${x.output_dir}/0", {"b": "$${x.output_dir} $5 ${y.id}"}], "c": 3}
    assert references_in(value) == [("/a/0", "x"), ("/a/1/b", "y")]
    shown = filled_in(value, lambda stage, what: f"<{stage} {what}>")
    assert shown == {"a": ["<x output_dir>/0", {"b": "${x.output_dir} $5 <y id>"}], "c": 3}


@pytest.mark.parametrize("text", ["${", "${x", "${x}", "${x.}", "${.output_dir}", "${x.params}", "${x y.id}", "${}"])
def test_what_is_no_reference(text):
    with pytest.raises(BadReference) as error:
        references_in({"a/b": text})
    assert error.value.pointer == "/a~1b"


@pytest.mark.parametrize(
    ("states", "state"),
    [
        ([S.SUCCEEDED, S.SUCCEEDED], S.SUCCEEDED), ([S.SUCCEEDED, S.RUNNING, S.QUEUED], S.RUNNING),
        ([S.STOPPING, S.QUEUED], S.STOPPING), ([S.FAILED, S.QUEUED], S.QUEUED), ([S.PAUSED, S.SUCCEEDED], S.PAUSED),
        ([S.FAILED, S.CANCELLED], S.FAILED), ([S.CANCELLED, S.SUCCEEDED], S.CANCELLED), ([S.STARTING], S.STARTING),
    ],
)  # fmt: skip
def test_the_state_of_a_pipeline(states, state):
    assert pipeline_state(states) == pipeline_state(states[::-1]) == state


def test_yaml_is_read_as_1_2_reads_it():
    text = (
        b"on: no\nlr: 1e-4\nten: 010\nday: 2026-01-01\nhex: 0x1f\nnone:\nflag: true\nhalf: .5\ntime: 1:30\nmany: 1_000"
    )
    assert read_yaml(text) == {
        "on": "no", "lr": 1e-4, "ten": 10, "day": "2026-01-01", "hex": "0x1f", "none": None, "flag": True, "half": 0.5,
        "time": "1:30", "many": "1_000",
    }  # fmt: skip


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_refused(data):
    with suppress(Unreadable):
        read_yaml(data)
