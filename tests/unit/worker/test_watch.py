"""Which directories are checkpoints, when they are whole, and that each content is handed out once."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from worker import watch
from worker.watch import CheckpointWatch


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("worker.watch.time.monotonic", lambda: now[0])
    return now


def make(directory: Path, value: float = 1.0) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}")
    save_file({"w": torch.full((4, 4), value)}, directory / "model.safetensors")
    return directory


def found(
    watcher: CheckpointWatch, clock: list[float], *, after: float = watch.SETTLE_S, final: bool = False
) -> list[str]:
    clock[0] += after
    return [one.path.name for one in watcher.look(final)]


def test_a_checkpoint_is_handed_out_once_when_it_has_settled(tmp_path: Path, clock: list[float]) -> None:
    watcher = CheckpointWatch(tmp_path / "later", pass_over_present=True)
    assert found(watcher, clock) == []
    zero = make(tmp_path / "later" / "0")
    assert found(watcher, clock) == []
    assert found(watcher, clock, after=watch.SETTLE_S / 2) == []
    assert found(watcher, clock) == ["0"]
    assert found(watcher, clock) == []
    (zero / "val_metrics.json").write_text("{}")  # what is not judged changes nothing
    assert found(watcher, clock) == []
    make(zero, 2.0)
    os.utime(zero / "model.safetensors", ns=(1, 1))
    assert found(watcher, clock) == []
    assert found(watcher, clock) == ["0"]


def test_a_torn_one_waits_for_the_rest(tmp_path: Path, clock: list[float]) -> None:
    watcher = CheckpointWatch(tmp_path, pass_over_present=True)
    whole = (make(tmp_path / "0") / "model.safetensors").read_bytes()
    (tmp_path / "0" / "model.safetensors").write_bytes(whole[:-8])
    assert found(watcher, clock) == []
    assert found(watcher, clock) == []
    assert found(watcher, clock, after=watch.TORN_S) == ["0"]  # nobody goes on writing it
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "config.json").write_text("{}")
    (tmp_path / "1" / "model.safetensors").write_bytes(whole[:40])
    assert found(watcher, clock) == []
    assert found(watcher, clock, final=True) == ["1"]


@pytest.mark.parametrize("name", [".0", "0.tmp", "tmp-checkpoint-3", "checkpoint_tmp", "0.temp.12"])
def test_work_in_progress_is_no_checkpoint(tmp_path: Path, clock: list[float], name: str) -> None:
    make(tmp_path / name)
    assert found(CheckpointWatch(tmp_path, pass_over_present=False), clock, final=True) == []


def test_links_are_passed_over(tmp_path: Path, clock: list[float]) -> None:
    make(tmp_path / "out" / "0")
    (tmp_path / "out" / "checkpoint_best").symlink_to("0")
    elsewhere = make(tmp_path / "elsewhere" / "7")
    (tmp_path / "out" / "more").symlink_to(elsewhere.parent)
    assert found(CheckpointWatch(tmp_path / "out", pass_over_present=False), clock, final=True) == ["0"]


def test_what_was_there_before_is_passed_over_until_it_changes(tmp_path: Path, clock: list[float]) -> None:
    make(tmp_path / "0")
    watcher = CheckpointWatch(tmp_path, pass_over_present=True)
    assert found(watcher, clock, final=True) == []
    make(tmp_path / "0", 3.0)
    os.utime(tmp_path / "0" / "model.safetensors", ns=(5, 5))
    assert found(watcher, clock, final=True) == ["0"]


def test_epoch_and_step_by_name_or_by_the_state_beside(tmp_path: Path) -> None:
    (make(tmp_path / "3") / "training_state.json").write_text(json.dumps({"epoch": 3, "global_step": 77}))
    (make(tmp_path / "4") / "training_state.json").write_text("{broken")
    (make(tmp_path / "checkpoint-500") / "trainer_state.json").write_text(json.dumps({"epoch": 1.5, "global_step": 9}))
    make(tmp_path / "epoch_0_step_100")
    make(tmp_path / "my-run-step250")
    state = tmp_path / "run-step8"
    state.mkdir()
    torch.save({"draft_state_dict": {}}, state / "training_state.pt")
    seen = {one.path.name: (one.epoch, one.step) for one in CheckpointWatch(tmp_path, False).look(final=True)}
    assert seen == {
        "3": (3, 77),
        "4": (4, None),
        "checkpoint-500": (None, 500),
        "epoch_0_step_100": (0, 100),
        "my-run-step250": (None, 250),
        "run-step8": (None, 8),
    }
