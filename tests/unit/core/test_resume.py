"""Stopping anywhere and going on: same data, same noise, same schedule, nothing trained twice."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3_core.contract.events import EventWriter
from eagle3_core.contract.params import TrainParams
from eagle3_core.errors import CheckpointError, Diverged
from tests import tiny
from worker.context import StageContext, StageResult, Stopped
from worker.stages import train

GOLDEN = Path(__file__).parents[2] / "golden"
EMBEDDING = "embed_tokens.weight"


class StopAtLook(threading.Event):
    """A stop that comes at the n-th time somebody looks for one."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.left = looks

    def is_set(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Any]:
    return tiny.make_training_inputs(tmp_path, rows=8) | {"seed": 3}


def run(inputs: dict[str, Any], output: Path, stop: threading.Event | None = None) -> StageResult:
    """One attempt of a train job."""
    output.mkdir(exist_ok=True)
    control = output.with_name(f"{output.name}-control")
    control.mkdir(exist_ok=True)
    number = len(list(output.parent.glob(f"{output.name}-events-*")))
    events = EventWriter(output.parent / f"{output.name}-events-{number}")
    context = StageContext("job", TrainParams(**inputs), output, events, control, stop or threading.Event())
    try:
        return train.run(context)
    finally:
        events.close()


def events_of(output: Path, attempt: int, kind: str) -> list[dict[str, Any]]:
    lines = (output.parent / f"{output.name}-events-{attempt}").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["type"] == kind]


def weights(output: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(output / name / "model.safetensors")


# 6 training rows and 2 for validation an epoch: one look after each step, one before and one after each row validated.
@pytest.mark.parametrize("looks", [0, 3, 5, 6, 7, 8, 9, 11])
def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(tmp_path: Path, inputs: dict[str, Any], looks: int) -> None:
    whole = run(inputs, tmp_path / "whole")
    parts = tmp_path / "parts"
    with pytest.raises(Stopped):
        run(inputs, parts, StopAtLook(looks))
    saved = [path.name for path in parts.iterdir() if path.name.startswith("step_")]
    assert len(saved) == 1
    rest = run(inputs, parts)
    there = sorted(path.name for path in parts.iterdir())
    assert there == ["0", "1", "checkpoint_best"], "what was saved within an epoch is needless now"
    [removed] = [e for attempt in (0, 1) for e in events_of(parts, attempt, "checkpoint_removed")]
    assert Path(removed["path"]).name == saved[0]
    assert rest.data["steps"] == whole.data["steps"] == 12
    rows = [epoch["train"]["rows"] for epoch in whole.data["epochs"]]
    told = [e["train"]["rows"] for attempt in (0, 1) for e in events_of(parts, attempt, "epoch")]
    assert told == rows
    ours, theirs = weights(parts, "1"), weights(tmp_path / "whole", "1")
    for name, tensor in theirs.items():
        # Weights come back from bfloat16, so the last digits differ.
        assert torch.allclose(ours[name].float(), tensor.float(), rtol=0.05, atol=0.01), name
    resumed = next(e for e in events_of(parts, 1, "report") if e["title"] == "resumed")
    assert resumed["data"]["step"] == int(saved[0].removeprefix("step_"))


def test_another_order_of_the_data_would_be_noticed(tmp_path: Path, inputs: dict[str, Any]) -> None:
    run(inputs, tmp_path / "a")
    run(inputs | {"seed": 4}, tmp_path / "b")
    a, b = weights(tmp_path / "a", "1"), weights(tmp_path / "b", "1")
    assert not torch.allclose(a["fc.weight"].float(), b["fc.weight"].float(), rtol=0.05, atol=0.01)


def test_a_cancel_that_does_not_want_the_work_leaves_none(tmp_path: Path, inputs: dict[str, Any]) -> None:
    (tmp_path / "out-control").mkdir()
    (tmp_path / "out-control" / "cancel.json").write_text('{"grace_s": 30, "checkpoint": false}')
    with pytest.raises(Stopped):
        run(inputs, tmp_path / "out", StopAtLook(3))
    assert list((tmp_path / "out").iterdir()) == []


def test_a_trained_embedding_is_shipped_resumed_and_taken_over(tmp_path: Path, inputs: dict[str, Any]) -> None:
    asked = inputs | {"train_embedding": True, "weight_decay": 0.5}
    run(asked, tmp_path / "whole")
    with pytest.raises(Stopped):
        run(asked, tmp_path / "parts", StopAtLook(3))
    run(asked, tmp_path / "parts")
    one, other = (weights(tmp_path / name, "1")[EMBEDDING].float() for name in ("whole", "parts"))
    torch.testing.assert_close(one, other, rtol=0.1, atol=2e-3)
    verifier = load_file(tmp_path / "verifier" / "model.safetensors")["model.embed_tokens.weight"]
    moved = (one - verifier.bfloat16().float()).any(1)
    assert 0 < int(moved.sum()) < len(moved), "tokens that the data lacks stay as they are, weight decay or not"
    assert json.loads((tmp_path / "whole" / "1" / "config.json").read_text())["embed_requires_grad"] is True
    [first, second] = events_of(tmp_path / "whole", 0, "verdict")
    assert [first["verdict"], second["verdict"]] == ["valid", "valid"], second
    assert "own_embedding" in [finding["code"] for finding in second["findings"]]

    tuned = {key: value for key, value in inputs.items() if key != "vocab_map_dir"} | {"epochs": 1}
    run(tuned | {"finetune_from": str(tmp_path / "whole" / "1")}, tmp_path / "tuned")
    assert torch.equal(weights(tmp_path / "tuned", "0")[EMBEDDING].float(), one), "not trained on, but not lost"
    [verdict] = events_of(tmp_path / "tuned", 0, "verdict")
    assert verdict["verdict"] == "valid", verdict


def test_a_damaged_checkpoint_is_passed_over_by_name(tmp_path: Path, inputs: dict[str, Any]) -> None:
    output = tmp_path / "out"
    run(inputs | {"epochs": 1}, output)
    with pytest.raises(Stopped):
        run(inputs, output, StopAtLook(2))
    [within] = [path for path in output.iterdir() if path.name.startswith("step_")]
    file = within / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 0xFF
    file.write_bytes(data)
    (output / f"{within.name}.unsound" / "of-an-earlier-attempt").mkdir(parents=True)
    result = run(inputs, output)
    assert result.data["steps"] == 12
    [warning] = events_of(output, 2, "warning")
    assert warning["code"] == "checkpoint_passed_over"
    assert within.name in warning["message"]
    assert sorted(path.name for path in output.iterdir()) == [
        "0",
        "1",
        "checkpoint_best",
        f"{within.name}.unsound",
        f"{within.name}.unsound1",
    ]


def test_a_run_without_a_sound_checkpoint_starts_anew_and_keeps_what_it_writes(
    tmp_path: Path, inputs: dict[str, Any]
) -> None:
    output = tmp_path / "out"
    run(inputs | {"epochs": 1}, output)
    (output / "0" / "model.safetensors").write_bytes(b"cut")
    run(inputs, output)
    assert [event["code"] for event in events_of(output, 1, "warning")] == ["checkpoint_passed_over"]
    assert [event["verdict"] for event in events_of(output, 1, "verdict")] == ["valid", "valid"]
    assert sorted(path.name for path in output.iterdir()) == ["0", "0.unsound", "1", "checkpoint_best"]


@pytest.mark.parametrize("damage", ["no manifest", "manifest cut", "no step", "empty directory", "file"])
def test_what_bears_the_name_of_a_checkpoint_and_is_none_makes_way(
    tmp_path: Path, inputs: dict[str, Any], damage: str
) -> None:
    output = tmp_path / "out"
    run(inputs, output)
    manifest = output / "1" / "manifest.json"
    if damage == "no manifest":
        manifest.unlink()
    elif damage == "manifest cut":
        manifest.write_text(manifest.read_text()[:100])
    elif damage == "no step":
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "step": "last"}))
    else:
        shutil.rmtree(output / "1")
        (output / "1").mkdir() if damage == "empty directory" else (output / "1").touch()
    assert run(inputs, output).data["steps"] == 12
    [warning] = events_of(output, 1, "warning")
    assert (warning["code"], warning["message"].endswith("1.unsound")) == ("name_taken", True)
    assert [event["verdict"] for event in events_of(output, 1, "verdict")] == ["valid"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ttt_steps": 2}, "ttt_steps is 3 there, 2 here"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 1 there, 2 here"),
        ({"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1}, "head_dim is 8 there, 16 here"),
        ({"train_head": False}, "lm_head.weight trained there and not here"),
        ({"train_embedding": True}, "embed_tokens.weight trained here and not there"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_checkpoint_of_another_drafter_is_not_gone_on_from(
    tmp_path: Path, inputs: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    run(inputs | {"epochs": 1}, tmp_path / "out")
    with pytest.raises(CheckpointError, match=f"out/0 does not fit this run: .*{said}.* as finetune_from"):
        run(inputs | changes, tmp_path / "out")


@pytest.mark.parametrize("position", [{"epoch": "x"}, {"rows_done": -5}, {"totals": None}])
def test_a_position_that_cannot_be_is_named(tmp_path: Path, inputs: dict[str, Any], position: dict[str, Any]) -> None:
    run(inputs | {"epochs": 1}, tmp_path / "out")
    file = tmp_path / "out" / "0" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["extra"]["position"] |= position
    file.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="out/0 does not fit this run: "):
        run(inputs, tmp_path / "out")


def test_a_run_goes_on_from_a_checkpoint_written_before_rows_were_packed(
    tmp_path: Path, inputs: dict[str, Any]
) -> None:
    """tests/golden/checkpoint-before-packing: after 4 of 6 steps, of one row each; its sums know of no weights."""
    vocab_map = tiny.make_vocab_map(tmp_path / "small", Path(inputs["data_dir"]), size=24)
    sizes = {"intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    asked = inputs | sizes | {"vocab_map_dir": str(vocab_map), "epochs": 1}
    within = Path(shutil.copytree(GOLDEN / "checkpoint-before-packing", tmp_path / "out" / "step_4"))
    before = json.loads((within / "manifest.json").read_text())["extra"]["position"]["totals"]
    assert "weights" not in before and before["rows"] == [44, 40, 36]
    train = run(asked, tmp_path / "out").data["epochs"][0]["train"]
    [resumed] = [event for event in events_of(tmp_path / "out", 0, "report") if event["title"] == "resumed"]
    assert (resumed["data"]["step"], resumed["data"]["rows_done"]) == (4, 4)
    whole = run(asked, tmp_path / "whole").data["epochs"][0]["train"]
    assert train["rows"] == whole["rows"] == [66, 60, 54]
    assert train["loss_per_step"] == pytest.approx(whole["loss_per_step"], rel=1e-2)


def test_checkpoints_within_an_epoch_when_due_and_when_asked_for(tmp_path: Path, inputs: dict[str, Any]) -> None:
    (tmp_path / "out-control").mkdir()
    (tmp_path / "out-control" / "checkpoint.json").write_text('{"id": "a"}')
    run(inputs | {"save_steps": 4}, tmp_path / "out")
    told = [Path(event["path"]).name for event in events_of(tmp_path / "out", 0, "checkpoint")]
    assert told == ["step_1", "step_5", "0", "step_10", "1"]
    assert {event["verdict"] for event in events_of(tmp_path / "out", 0, "verdict")} == {"valid"}


def test_a_loss_that_is_not_finite_names_step_and_file(tmp_path: Path, inputs: dict[str, Any]) -> None:
    with pytest.raises(Diverged, match=r"at step 2, on .*/shard_0000\d.safetensors, row \d; lower lr"):
        run(inputs | {"lr": 1e30, "warmup_ratio": 0.0}, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
