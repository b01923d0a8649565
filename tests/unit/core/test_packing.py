"""Packs and optimizer steps: what a run does must not depend on how its rows were put together."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from eagle3_core.contract.params import TrainParams
from eagle3_core.data.store import HiddenStateStore
from eagle3_core.errors import Diverged
from eagle3_core.training.packing import packs, steps
from tests import tiny
from tests.unit.core.test_resume import StopAtLook, events_of, run, weights
from worker.context import Stopped


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Any]:
    # 8 rows of 24 tokens, 6 of them for training.
    return tiny.make_training_inputs(tmp_path, rows=8) | {"seed": 3}


def test_a_pack_is_filled_until_the_next_row_would_exceed_the_budget() -> None:
    lengths = [4, 3, 3, 9, 1, 10, 12, 2]
    assert list(packs(range(8), lengths, 10)) == [[0, 1, 2], [3, 4], [5], [6], [7]]
    assert list(packs([7, 6, 0, 1], lengths, 1)) == [[7], [6], [0], [1]]
    assert list(packs([], lengths, 10)) == []


def test_what_follows_a_packs_end_does_not_depend_on_what_came_before() -> None:
    lengths = [int(n) for n in torch.randint(1, 40, (200,), generator=torch.Generator().manual_seed(0))]
    whole = list(steps(range(200), lengths, 64, 3))
    done = 0
    for number, step in enumerate(whole):
        assert list(steps(range(done, 200), lengths, 64, 3)) == whole[number:]
        done += sum(len(pack) for pack in step)
    assert done == 200


def test_packed_and_accumulated_runs_end_with_the_same_weights(inputs: dict[str, Any], tmp_path: Path) -> None:
    shapes = [
        {"batch_tokens": 3 * 24},
        {"batch_tokens": 1, "accumulate_packs": 3},
        {"batch_tokens": 2 * 24, "accumulate_packs": 2},
    ]
    runs = [run(inputs | shape, tmp_path / f"out{number}") for number, shape in enumerate(shapes)]
    assert [result.data["steps"] for result in runs[:2]] == [4, 4], "two steps an epoch, of three rows each"
    one, other = (weights(tmp_path / f"out{number}", "1") for number in range(2))
    for name in one:
        # Checkpoints are bfloat16: a rounding apart at most.
        torch.testing.assert_close(one[name].float(), other[name].float(), rtol=1e-2, atol=1e-5)
    losses = [result.data["epochs"][-1]["train"]["loss"] for result in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] != pytest.approx(losses[2], rel=1e-5), "four rows a step are another run"


def test_a_packed_run_goes_on_where_it_stopped(inputs: dict[str, Any], tmp_path: Path) -> None:
    packed = inputs | {"batch_tokens": 2 * 24}
    whole = run(packed, tmp_path / "whole")
    with pytest.raises(Stopped):
        run(packed, tmp_path / "parts", StopAtLook(1))
    parts = run(packed, tmp_path / "parts")
    assert (whole.data["steps"], parts.data["steps"]) == (6, 6)
    one, other = (weights(tmp_path / name, "1") for name in ("whole", "parts"))
    for name in one:
        torch.testing.assert_close(one[name].float(), other[name].float(), rtol=0.1, atol=2e-3)
    rows = [[epoch["train"]["rows"] for epoch in result.data["epochs"]] for result in (whole, parts)]
    assert rows[0] == rows[1]


def test_rows_with_a_choice_outside_the_vocabulary_are_skipped_and_counted(
    inputs: dict[str, Any], tmp_path: Path
) -> None:
    kept = run(inputs | {"epochs": 1}, tmp_path / "keep").data["epochs"][0]
    skipped = run(inputs | {"epochs": 1, "outside_vocab": "skip"}, tmp_path / "skip").data["epochs"][0]
    assert "outside_vocab" not in kept["train"]
    [told] = [each["data"] for each in events_of(tmp_path / "keep", 0, "report") if each["title"] == "outside_vocab"]
    assert told == {"outside": skipped["val"]["outside_vocab"][0], "rows": kept["val"]["rows"][0]}
    assert not [each for each in events_of(tmp_path / "skip", 0, "report") if each["title"] == "outside_vocab"]
    run(inputs | {"epochs": 1, "val_ratio": 0.0}, tmp_path / "none")
    [told] = [each["data"] for each in events_of(tmp_path / "none", 0, "report") if each["title"] == "outside_vocab"]
    assert told["rows"] == 12 - 1, "one training row in ten, at least one, where none is held out"
    for split in ("train", "val"):
        assert all(count > 0 for count in skipped[split]["outside_vocab"])
        total = [a + b for a, b in zip(skipped[split]["rows"], skipped[split]["outside_vocab"], strict=True)]
        assert total == kept[split]["rows"]


def test_a_pack_whose_loss_is_not_finite_names_the_row(inputs: dict[str, Any], tmp_path: Path) -> None:
    store = HiddenStateStore(Path(inputs["data_dir"]))
    ids = [store.read(row).token_ids_T for row in range(len(store))]
    others = torch.cat([*ids[:5], *ids[6:]])
    token = next(int(token) for token in ids[5][1:20] if token not in others)
    file = Path(inputs["verifier"]) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][token] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(Diverged, match=r"at step 1, on \S+, row 5; lower lr"):
        run(inputs | {"batch_tokens": 1000, "val_ratio": 0.0}, tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ttt_step_weights": (1.0, 0.5)}, "2 entries for 3 ttt_steps"),
        ({"ttt_step_weights": (0.0, 0.0, 0.0)}, "all zero"),
        ({"loss": {}}, "at least 1"),
        ({"loss": {"hinge": 1.0}}, "hinge"),
        ({"loss": {"tv": 0.0}}, "greater than 0"),
        ({"batch_tokens": 0}, "greater than or equal to 1"),
    ],
)
def test_requests_that_make_no_sense(inputs: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        TrainParams(**(inputs | changes))


def test_step_weights_replace_the_decay(inputs: dict[str, Any], tmp_path: Path) -> None:
    asked = {"epochs": 1, "ttt_step_weights": (1.0, 0.0, 0.5), "loss": {"lk_hybrid": 1.0, "forward_kl": 0.1}}
    train = run(inputs | asked, tmp_path / "out").data["epochs"][0]["train"]
    first, _, third = train["loss_per_step"]
    assert train["loss"] == pytest.approx(first + 0.5 * third)
