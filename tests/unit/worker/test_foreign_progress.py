"""Readings of a foreign program become events: throttled, merged, and honest about what was not seen."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from eagle3_core.contract.events import EventWriter
from eagle3_core.contract.params import AdoptParams
from worker.adapters.reading import Reading
from worker.context import StageContext
from worker.foreign_progress import ForeignProgress


@pytest.fixture
def progress(tmp_path: Path) -> ForeignProgress:
    context = StageContext(
        "job", AdoptParams(pid=1), tmp_path, EventWriter(tmp_path / "events.jsonl"), tmp_path, threading.Event()
    )
    return ForeignProgress(context)


def told(progress: ForeignProgress, kind: str) -> list[dict[str, Any]]:
    lines = (progress.context.output_dir / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["type"] == kind]


def test_a_thousand_readings_at_once_are_one_event(progress: ForeignProgress) -> None:
    for step in range(1000):
        progress.take(Reading(step=step, steps=1000, loss=float(step), values={"grad_norm": 1.0}))
        progress.tell()
    progress.end(succeeded=False)
    assert [event["step"] for event in told(progress, "progress")] == [0, 999]
    assert [event["step"] for event in told(progress, "metric")] == [0, 999]


def test_epochs_of_the_past_are_not_timed(progress: ForeignProgress) -> None:
    progress.live = False
    progress.take(Reading(epoch=0, loss=3.0))
    progress.take(Reading(epoch=1, loss=2.0))
    progress.live = True
    progress.take(Reading(epoch=2, epochs=4, loss=1.0))
    progress.take(Reading(epoch=2, loss=2.0, accuracy=(0.5,)))
    progress.take(Reading(epoch=2, validation={"loss": 1.5}))
    progress.take(Reading(epoch=3))
    progress.end(succeeded=False)
    [epoch] = told(progress, "epoch")
    assert (epoch["epoch"], epoch["epochs"], epoch["train"]) == (2, 4, {"loss": 1.5, "accuracy": [0.5]})
    assert epoch["val"] == {"loss": 1.5}


def test_a_bar_that_stood_in_is_forgotten(progress: ForeignProgress) -> None:
    progress.take(Reading(step=16, steps=16, unit="files", stand_in=True))
    progress.take(Reading(step=2, loss=1.0, unit="steps"))
    progress.end(succeeded=False)
    [event] = told(progress, "progress")
    assert (event["step"], event["steps"], event["unit"]) == (2, None, "steps")


@pytest.mark.parametrize(
    ("steps", "finished", "unfinished"),
    [
        ([10, 20, 30], False, "step 30 of 100"),
        ([80, 90], False, "step 90 of 100"),
        ([85, 95], False, None),  # as far as its next line
        ([99, 100], False, None),
        ([10, 20], True, None),
        ([10], False, None),  # one line shows no stride
    ],
)
def test_whether_it_stopped_before_its_end(
    progress: ForeignProgress, steps: list[int], finished: bool, unfinished: str | None
) -> None:
    for step in steps:
        progress.take(Reading(step=step, steps=100))
    progress.take(Reading(finished=finished))
    assert progress.unfinished() == unfinished


def test_a_loss_that_is_not_finite_is_told_once(progress: ForeignProgress) -> None:
    for _ in range(3):
        progress.take(Reading(step=7, loss=float("nan")))
    assert progress.nonfinite == "the output shows a loss of nan at step 7"
    assert len(told(progress, "warning")) == 1
    progress.end(succeeded=False)
    assert told(progress, "progress")[-1]["loss"] is None
