"""What is news of which kind, durations, and places in streams."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from client.following import ServerSentEvent, parse_stream
from eagle3_core.contract.durations import parse_duration
from server.api.streams import Place
from server.domain.changes import news_of
from server.domain.job import Attempt, Job
from server.domain.progress import EpochDone, LastCheckpoint, add_warning
from server.domain.states import AttemptState, JobState

NOW = datetime(2026, 1, 1, tzinfo=UTC)
RUNNING = Job(
    number=1, id="j", name="j", stage="train", params={}, output_dir="/o", created_at=NOW, state=JobState.RUNNING,
    attempt=Attempt(1, AttemptState.RUNNING),
)  # fmt: skip
EPOCH = EpochDone(epoch=0, train_s=1.0, val_s=1.0, train={}, val=None)


def with_status(job, **changes):
    return replace(job, status=job.status.model_copy(update=changes))


@pytest.mark.parametrize(
    ("new", "kinds"),
    [
        (with_status(RUNNING, last_seq=9, last_boottime_s=3.0, elapsed_s=4.0, eta_s=1.0, last_event_at=NOW), ""),
        (with_status(RUNNING, step=5), "progress"),
        (with_status(RUNNING, loss=0.5), "progress"),
        (with_status(RUNNING, epoch=0), "progress change"),
        (with_status(RUNNING, phase="validating"), "progress change"),
        (with_status(RUNNING, epochs_done=[EPOCH]), "progress change epoch"),
        (with_status(RUNNING, last_checkpoint=LastCheckpoint(path="/c")), "progress change checkpoint"),
        (replace(RUNNING, health="stalled"), "progress change"),
        (replace(RUNNING, state=JobState.FAILED, reason="diverged"), "progress change"),
        (replace(RUNNING, cancel_asked_at=NOW), "progress change"),
        (replace(RUNNING, attempt=Attempt(2, AttemptState.STARTING)), "progress change"),
        (replace(RUNNING, status=add_warning(RUNNING.status, "odd", "odd", NOW)), "progress change"),
    ],
)
def test_kinds_of_news(new, kinds):
    news = news_of(RUNNING, new)
    assert " ".join(name for name, there in vars(news).items() if there) == kinds


def test_a_warning_that_comes_again_is_no_change():
    once = replace(RUNNING, status=add_warning(RUNNING.status, "odd", "odd", NOW))
    assert not news_of(once, replace(once, status=add_warning(once.status, "odd", "odd", NOW))).change


def test_a_verdict_is_news_of_the_checkpoint():
    written = with_status(RUNNING, last_checkpoint=LastCheckpoint(path="/c"))
    assert news_of(written, with_status(RUNNING, last_checkpoint=LastCheckpoint(path="/c", verdict="valid"))).checkpoint


def test_an_epoch_is_over_once():
    """The next one's beginning is no second end, but where nobody told of the end it is the first word of it."""
    told = with_status(RUNNING, epoch=0, epochs_done=[EPOCH])
    assert not news_of(told, with_status(told, epoch=1)).epoch
    untold = with_status(RUNNING, epoch=0)
    assert news_of(untold, with_status(untold, epoch=1)).epoch
    assert not news_of(RUNNING, untold).epoch


def test_seconds_in_a_reason_to_wait_are_no_change():
    queued = replace(RUNNING, state=JobState.QUEUED, attempt=None, waiting="another attempt in 9 s")
    assert not news_of(queued, replace(queued, waiting="another attempt in 10 s")).progress
    assert news_of(queued, replace(queued, waiting="waits for prepare")).change


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("1800 s", 1800),
        ("30m", 1800),
        ("2min", 120),
        ("1.5h", 5400),
        ("250ms", 0.25),
        ("1d", 86400),
        ("0", 0),
    ],
)
def test_durations(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "-1", "1e3", "10 fortnights", "nan", "inf", "٣", "9" * 12])
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match="no duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("last_id", "known", "ours", "number", "at_end"),
    [
        (None, False, False, 0, False),
        ("ab12-7", True, True, 7, False),
        ("ab12-7.end", True, True, 7, True),
        ("ff00-7", True, False, 0, False),
        ("ff00-7.end", True, False, 0, False),
        ("nonsense", True, False, 0, False),
        ("ab12--7", True, False, 0, False),
        ("ab12-" + "9" * 40, True, False, 0, False),
    ],
)
def test_places_in_a_stream(last_id, known, ours, number, at_end):
    place = Place(last_id, "ab12")
    assert (place.known, place.ours, place.number, place.at_end) == (known, ours, number, at_end)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_stream_is_read_however_it_is_cut(size):
    events = [
        "retry: 1000",
        'data: {"a": "é"}\nid: x-1',
        ": ping",
        "event: end\ndata: one\ndata: two\nid: x-1.end",
        "data: cut",
    ]
    raw = "\n\n".join(events).encode()
    pieces = [raw[start : start + size] for start in range(0, len(raw), size)]
    assert list(parse_stream(pieces)) == [
        ServerSentEvent("x-1", "", '{"a": "é"}'),
        ServerSentEvent("x-1.end", "end", "one\ntwo"),
    ]
