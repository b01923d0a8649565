"""Judging beside a training: in order, in a process of its own, and nothing of it in the training's way."""

import contextlib
import functools
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

import worker.judge
from eagle3_core.checkpoint.judge import judge as judge_at_once
from eagle3_core.contract.events import EventWriter
from eagle3_core.contract.params import TrainParams
from tests import makers, tiny
from worker import checkpoints
from worker.context import StageContext
from worker.judge import BackgroundJudge, Judged, JudgeFailed
from worker.stages import train

ALWAYS_THREAD, ALWAYS_PROCESS = 1 << 40, 0


@pytest.fixture
def judge_with():
    made = []

    def make(small_bytes: int = ALWAYS_PROCESS, verifier: Path | None = None) -> BackgroundJudge:
        made.append(BackgroundJudge(None if verifier is None else str(verifier), small_bytes=small_bytes))
        return made[-1]

    yield make
    for one in made:
        one.close()


def submit(judge: BackgroundJudge, *paths: Path) -> None:
    for path in paths:
        judge.submit(path, sum(file.stat().st_size for file in path.iterdir()))


def own_judges() -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [one for one in psutil.Process().children() if "worker.judge" in one.cmdline()]
    return []


def codes(judged: Judged) -> set[str]:
    return {finding.code for finding in judged.verdict.findings}


def test_each_is_compared_with_the_sound_one_before_it(judge_with, tmp_path):
    judge = judge_with(ALWAYS_THREAD)
    first, second, third = (makers.write_drafter(tmp_path, epoch) for epoch in range(3))
    (second / "model.safetensors").write_bytes(b"")
    submit(judge, first, second, third)
    assert len(judge) == 3
    taken = [judge.take() for _ in range(3)]
    assert [one.path for one in taken] == [first, second, third]
    assert [one.verdict.verdict for one in taken][:2] == ["valid", "unreadable"]
    assert ["weights_unchanged" in codes(one) for one in taken] == [False, False, True]
    assert len(judge) == 0
    assert not judge.ready()


def test_beside_a_training_it_reads_slowly_until_nobody_trains(judge_with, tmp_path, wait_for, monkeypatch):
    """Some 100 kB at 100 bytes a second would take a quarter of an hour."""
    monkeypatch.setattr(worker.judge, "MB_PER_S_BESIDE_TRAINING", 1e-4)
    judge, path = judge_with(), makers.write_drafter(tmp_path)
    submit(judge, path)
    [process] = wait_for(own_judges)
    assert process.nice() == 19
    assert process.cmdline()[-4:] == ["--max-mb-per-s", "0.0001", "--", str(path)]
    assert not judge.ready()
    judge.hurry()
    assert judge.take().verdict == judge_at_once(path)


def test_one_that_is_cleared_away_meanwhile_is_passed_over(judge_with, tmp_path, wait_for, monkeypatch):
    monkeypatch.setattr(worker.judge, "MB_PER_S_BESIDE_TRAINING", 1e-4)
    judge = judge_with()
    first, second, third = (makers.write_drafter(tmp_path, epoch) for epoch in range(3))
    judge.previous = first
    submit(judge, second, third)
    wait_for(own_judges)
    for path in (first, second):
        shutil.rmtree(path)
    judge.hurry()
    assert judge.take() is None
    assert "weights_unchanged" not in codes(judge.take()), "what it would be compared with is gone"


def test_a_judge_that_dies_is_told_and_the_next_one_is_judged(judge_with, tmp_path, wait_for, monkeypatch):
    monkeypatch.setattr(worker.judge, "MB_PER_S_BESIDE_TRAINING", 1e-4)
    judge = judge_with()
    first, second, third = (makers.write_drafter(tmp_path, epoch) for epoch in range(3))
    judge.previous = first
    submit(judge, second, third)
    [process] = wait_for(own_judges)
    process.kill()
    with pytest.raises(JudgeFailed, match=f"the judge of {second} ended with -9 and said nothing"):
        judge.take()
    judge.hurry()
    assert judge.take().verdict == judge_at_once(third, previous=first)


def test_letting_it_go_ends_its_process_at_once(judge_with, tmp_path, wait_for, monkeypatch):
    monkeypatch.setattr(worker.judge, "MB_PER_S_BESIDE_TRAINING", 1e-4)
    judge = judge_with()
    submit(judge, *(makers.write_drafter(tmp_path, epoch) for epoch in range(2)))
    wait_for(own_judges)
    judge.close()
    assert own_judges() == []


def test_a_training_has_large_checkpoints_judged_by_a_process(tmp_path, monkeypatch):
    """The last of them at full rate, since nobody trains any more."""
    started: list[list[str]] = []
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        started.append(command)
        return popen(command, **options)

    monkeypatch.setattr(worker.judge.subprocess, "Popen", start)
    monkeypatch.setattr(checkpoints, "BackgroundJudge", functools.partial(BackgroundJudge, small_bytes=ALWAYS_PROCESS))
    inputs = tiny.make_training_inputs(tmp_path)
    (tmp_path / "out").mkdir()
    events = EventWriter(tmp_path / "events")
    params = TrainParams(**(inputs | {"epochs": 2}))
    train.run(StageContext("job", params, tmp_path / "out", events, tmp_path / "control"))
    events.close()
    told = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    verdicts = [event for event in told if event["type"] == "verdict"]
    assert [(Path(one["path"]).name, one["verdict"]) for one in verdicts] == [("0", "valid"), ("1", "valid")]
    assert {command[-1] for command in started} == {str(tmp_path / "out" / name) for name in "01"}
    assert all("--verifier" in command and "--expect-drafter" in command for command in started)
    assert "--max-mb-per-s" not in started[-1]
