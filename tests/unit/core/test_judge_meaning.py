"""The judge on what tensors mean together: map, optimizer, other checkpoints; its stage and its command."""

import json
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from client.checkpoint import EXIT_STATUS, verify
from eagle3_core.checkpoint import judge_rows, stream
from eagle3_core.checkpoint.findings import CODES
from eagle3_core.checkpoint.judge import judge
from eagle3_core.contract.events import EventWriter, parse_event
from eagle3_core.contract.params import ValidateParams
from eagle3_core.errors import InvalidCheckpoint
from tests.cases import make_case
from tests.judging import OPTIMIZER, WEIGHTS, drop, foreign, found, loud, put
from tests.makers import (
    DRAFTER,
    D,
    H,
    V,
    draft_ids,
    drafter_tensors,
    optimizer_state,
    random,
    write_config,
    write_drafter,
    write_verifier,
)
from worker.context import StageContext
from worker.stages import validate


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_drafter(tmp_path / "run")


# ---------------------------------------------------------------- vocabulary map

OFFSETS = draft_ids() - torch.arange(D)


def swapped() -> Tensor:
    d2t = OFFSETS.clone()
    d2t[[3, 15]] = d2t[[15, 3]]
    return d2t


def permuted() -> Tensor:
    ids = draft_ids()
    ids[[3, 15]] = ids[[15, 3]]
    return ids - torch.arange(D)


@pytest.mark.parametrize(
    ("d2t", "code", "words"),
    [
        (draft_ids(), "d2t_absolute", "looks absolute"),
        (torch.zeros(D, dtype=torch.int64), "identity_slice", "arbitrary slice"),
        (torch.full((D,), 10**6), "d2t_out_of_range", "24 draft ids"),
        (OFFSETS.index_fill(0, torch.tensor([0]), -1), "d2t_out_of_range", "0 -> -1"),
        (torch.arange(D).flip(0), "d2t_duplicates", "more than once"),
        (swapped(), "d2t_t2d_differ", "contradict"),
        (OFFSETS.index_fill(0, torch.tensor([0]), 0), "d2t_t2d_differ", "[0]"),
    ],
)
def test_a_wrong_map_is_named(tmp_path: Path, d2t: Tensor, code: str, words: str) -> None:
    verdict = judge(foreign(tmp_path, put("d2t", d2t)))
    finding = found(verdict, code)
    assert (verdict.verdict, finding.file, finding.tensor) == ("invalid", WEIGHTS, "d2t")
    assert words in finding.message


def test_the_identity_slice_with_a_mask_that_agrees(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["d2t"] = torch.zeros(D, dtype=torch.int64)
        tensors["t2d"] = torch.arange(V) < D

    assert found(judge(foreign(tmp_path, change)), "identity_slice").severity == "error"


def test_a_mask_with_another_count(tmp_path: Path) -> None:
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[draft_ids()] = True
    t2d[0] = True
    verdict = judge(foreign(tmp_path, put("t2d", t2d)))
    assert found(verdict, "t2d_count").tensor == "t2d"
    assert "25 tokens" in found(verdict, "t2d_count").message


def test_a_permuted_map_is_suspect_where_the_format_sorts(tmp_path: Path) -> None:
    verdict = judge(foreign(tmp_path, put("d2t", permuted())))
    assert (verdict.verdict, loud(verdict)) == ("suspect", ["d2t_not_ascending"])


def test_absolute_ids_are_known_without_a_mask(tmp_path: Path) -> None:
    path = foreign(tmp_path, lambda tensors: tensors.update({"d2t": torch.arange(D)}) or tensors.pop("t2d"))
    assert found(judge(path), "d2t_absolute").tensor == "d2t"


# ---------------------------------------------------------------- optimizer


def test_an_optimizer_of_another_drafter(tmp_path: Path) -> None:
    wide = drafter_tensors(DRAFTER.model_copy(update={"intermediate_size": 40}))
    verdict = judge(write_drafter(tmp_path, optimizer=optimizer_state(wide)))
    finding = found(verdict, "optimizer_mismatch")
    assert (verdict.verdict, finding.file) == ("invalid", OPTIMIZER)
    assert finding.tensor is not None
    assert ".mlp." in finding.tensor


def test_an_optimizer_with_bad_numbers(tmp_path: Path) -> None:
    state = optimizer_state(drafter_tensors())
    state["state"][2]["exp_avg"].view(-1)[0] = float("nan")
    verdict = judge(write_drafter(tmp_path, optimizer=state))
    finding = found(verdict, "not_finite")
    assert (finding.file, finding.tensor) == (OPTIMIZER, state["param_groups"][0]["param_names"][2])


def test_an_optimizer_and_a_schedule_without_a_learning_rate(tmp_path: Path) -> None:
    path = foreign(tmp_path)
    state = optimizer_state(drafter_tensors())
    state["param_groups"][0]["lr"] = float("nan")
    torch.save(state, path / OPTIMIZER)
    torch.save({"last_epoch": 3, "_last_lr": [float("inf")]}, path / "scheduler_state_dict.pt")
    verdict = judge(path)
    assert "learning rate is nan" in found(verdict, "optimizer_mismatch").message
    assert found(verdict, "scheduler_layout").message == "_last_lr of scheduler_state_dict.pt is [inf]"


def test_an_optimizer_without_some_states(tmp_path: Path) -> None:
    state = optimizer_state(drafter_tensors())
    del state["state"][0]
    verdict = judge(write_drafter(tmp_path, optimizer=state))
    assert verdict.verdict == "suspect"
    assert found(verdict, "optimizer_incomplete").tensor == state["param_groups"][0]["param_names"][0]


def test_a_stale_optimizer(tmp_path: Path) -> None:
    verdict = judge(write_drafter(tmp_path, optimizer=optimizer_state(drafter_tensors(), steps=1), steps=3))
    assert (verdict.verdict, loud(verdict)) == ("suspect", ["optimizer_stale"])


def test_an_optimizer_without_names_is_judged_by_shape(tmp_path: Path) -> None:
    state = optimizer_state(drafter_tensors())
    del state["param_groups"][0]["param_names"]
    assert judge(write_drafter(tmp_path / "a", optimizer=state)).verdict == "valid"
    state["state"][1]["exp_avg"] = torch.zeros(7, 7)
    assert found(judge(write_drafter(tmp_path / "b", optimizer=state)), "optimizer_mismatch")


@pytest.mark.parametrize("state", [{"a": 1}, {"state": {}, "param_groups": [{"params": 3}]}])
def test_an_unknown_optimizer(tmp_path: Path, state: dict[str, Any]) -> None:
    assert found(judge(write_drafter(tmp_path, optimizer=state)), "optimizer_layout").file == OPTIMIZER


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, int]]:
        return os.mkdir, (str(self.path), 0o700)


@pytest.mark.parametrize("name", [OPTIMIZER, "scheduler_state_dict.pt"])
def test_a_pickle_that_wants_to_run_code_is_a_finding(checkpoint: Path, tmp_path: Path, name: str) -> None:
    canary = tmp_path / "CANARY"
    for content in (pickle.dumps(Canary(canary)), None):
        if content is None:
            torch.save({"state": Canary(canary)}, checkpoint / name)
        else:
            (checkpoint / name).write_bytes(content)
        verdict = judge(checkpoint)
        assert (verdict.verdict, found(verdict, "unsafe_pickle").file) == ("invalid", name)
    assert not canary.exists()


# ---------------------------------------------------------------- previous epoch and verifier


def test_weights_that_did_not_move(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    first = write_drafter(tmp_path, 0, tensors=tensors)
    assert (
        found(judge(write_drafter(tmp_path, 1, tensors=tensors), previous=first), "weights_unchanged").file == WEIGHTS
    )
    moved = {**drafter_tensors(seed=90), "fc.weight": tensors["fc.weight"]}
    verdict = judge(write_drafter(tmp_path, 2, tensors=moved, steps=2), previous=first)
    assert verdict.verdict == "valid"
    assert "fc.weight" in {f.tensor for f in verdict.findings if f.code == "tensor_unchanged"}


def test_two_norms_that_were_swapped_are_told_by_the_epoch_before(tmp_path: Path) -> None:
    names = ("norm.weight", "layers.0.hidden_norm.weight")

    def norms(epoch: int) -> dict[str, Tensor]:
        noise = (random(H, seed=number, dtype=torch.float32) for number in (1, 2, 10 * epoch, 10 * epoch + 1))
        one, other, step, step_other = noise
        values = 1 + one + 0.02 * step, 1 + other + 0.02 * step_other
        return dict(zip(names, (value.bfloat16() for value in values), strict=True))

    first = write_drafter(tmp_path, 0, tensors=drafter_tensors() | norms(1))
    second = drafter_tensors(seed=90) | norms(2)
    assert not judge(write_drafter(tmp_path, 1, tensors=second), previous=first).errors()
    one, other = names
    swapped_norms = second | {one: second[other], other: second[one]}
    verdict = judge(write_drafter(tmp_path, 2, tensors=swapped_norms), previous=first)
    assert {finding.tensor for finding in verdict.findings if finding.code == "tensors_swapped"} == set(names)


def test_a_map_that_changed_between_epochs(tmp_path: Path) -> None:
    first = write_drafter(tmp_path, 0)
    ids = torch.arange(V)[~torch.isin(torch.arange(V), draft_ids())][:D]
    other = drafter_tensors(seed=90) | {"d2t": ids - torch.arange(D), "t2d": torch.isin(torch.arange(V), ids)}
    other["embed_tokens.weight"] = random(V, H, seed=5)
    verdict = judge(write_drafter(tmp_path, 1, tensors=other), previous=first)
    assert {f.tensor for f in verdict.findings if f.code == "map_changed"} == {"d2t", "t2d"}
    assert found(verdict, "frozen_tensor_changed").tensor == "embed_tokens.weight"


def test_a_previous_checkpoint_that_cannot_be_read(tmp_path: Path, checkpoint: Path) -> None:
    verdict = judge(checkpoint, previous=tmp_path / "absent")
    assert (verdict.verdict, loud(verdict)) == ("suspect", ["previous_unreadable"])


def test_against_the_verifier(tmp_path: Path) -> None:
    verifier = write_verifier(tmp_path / "verifier")
    path = foreign(tmp_path, put("embed_tokens.weight", random(V, H, seed=55)))
    finding = found(judge(path, verifier=verifier), "embedding_differs")
    assert (finding.severity, finding.tensor) == ("warning", "embed_tokens.weight")
    assert "64 of 64 rows" in finding.message
    shutil.rmtree(tmp_path / "source")
    path = foreign(tmp_path, eagle_aux_hidden_state_layer_ids=[2, 4, 9])
    assert "[9]" in found(judge(path, verifier=verifier), "aux_id_out_of_range").message
    write_verifier(tmp_path / "other", vocab_size=V - 1)
    assert judge(path, verifier=tmp_path / "other").verdict == "invalid"
    write_config(tmp_path / "other", {"hidden_size": 32, "num_hidden_layers": 9, "vocab_size": V})
    assert "hidden_size" in found(judge(path, verifier=tmp_path / "other"), "verifier_differs").message
    assert found(judge(path, verifier=tmp_path / "absent"), "verifier_unreadable").severity == "warning"


def test_against_a_verifier_in_pieces_that_end_within_a_block(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "PIECE_BYTES", 32 * 2 * H)
    monkeypatch.setattr(judge_rows, "_BLOCK_VALUES", 10 * H)
    verdict = judge(checkpoint, verifier=write_verifier(tmp_path / "verifier", max_position_embeddings=2048))
    assert verdict.verdict == "valid", verdict.to_dict()


def test_a_verifier_in_another_precision(tmp_path: Path, checkpoint: Path) -> None:
    tensors = {
        "model.embed_tokens.weight": random(V, H, dtype=torch.float32) + 1e-9,
        "model.norm.weight": torch.ones(H),
    }
    verifier = write_verifier(tmp_path / "verifier", tensors, tie_word_embeddings=True)
    assert judge(checkpoint, verifier=verifier).verdict == "valid"


# ---------------------------------------------------------------- the stage and the command


def test_the_stage_reports_and_fails(tmp_path: Path, checkpoint: Path) -> None:
    def run(path: Path, number: int) -> tuple[Path, EventWriter, StageContext]:
        out = tmp_path / f"out{number}"
        out.mkdir()
        events = EventWriter(out / "events.jsonl")
        return out, events, StageContext("job", ValidateParams(checkpoint=str(path)), out, events, out / "control")

    out, events, context = run(checkpoint, 0)
    assert validate.run(context).data["verdict"] == "valid"
    events.close()
    assert json.loads((out / "verdict.json").read_text())["verdict"] == "valid"
    bad = foreign(tmp_path, drop("fc.weight"))
    out, events, context = run(bad, 1)
    with pytest.raises(InvalidCheckpoint, match=r"fc\.weight is missing"):
        validate.run(context)
    events.close()
    last = parse_event((out / "events.jsonl").read_bytes().splitlines()[-1])
    assert last.type == "verdict"
    assert last.verdict == "invalid"


def test_the_command(tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(checkpoint, "json") == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "valid"
    bad = foreign(tmp_path, drop("fc.weight"))
    assert verify(bad, "json") == EXIT_STATUS["invalid"] == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer.keys() == {"verdict", "level", "findings", "servers"}
    assert answer["findings"][0].keys() == {"code", "severity", "file", "tensor", "message", "hint"}
    assert verify(bad) == 2
    assert "missing_tensor" in capsys.readouterr().out
    assert verify(tmp_path / "absent") == 3


def test_every_code_is_explained() -> None:
    page = (Path(__file__).parents[3] / "docs" / "findings.md").read_text()
    explained = re.findall(r"^### `(\w+)`", page, flags=re.MULTILINE)
    assert sorted(explained) == sorted(CODES)


# ---------------------------------------------------------------- inputs that broke other tools


@pytest.mark.parametrize(
    ("case", "folder", "word", "code", "tensor"),
    [
        ("B01", ".", "invalid", "d2t_absolute", "d2t"),
        ("B02", ".", "invalid", "identity_slice", "d2t"),
        ("B03", ".", "invalid", "map_length", "d2t"),
        ("B05", ".", "invalid", "missing_tensor", "d2t"),
        ("B08", "sum", "invalid", "t2d_count", "t2d"),
        ("B08", "f32", "invalid", "dtype_differs", "d2t"),
        ("B08", "rank2", "invalid", "shape_differs", "t2d"),
        ("B08", "u8", "invalid", "dtype_differs", "t2d"),
        ("G03", ".", "unreadable", "trailing_bytes", "t2d"),
        ("G04", "nan", "invalid", "not_finite", "norm.weight"),
        ("G04", "inf", "invalid", "not_finite", "fc.weight"),
        ("G04", "zero", "suspect", "all_zero", "lm_head.weight"),
        ("G06", "cut", "invalid", "missing_tensor", "lm_head.weight"),
        ("G06", "full", "suspect", "head_absent", "lm_head.weight"),
        ("H02", "flag_no_tensor", "invalid", "flag_without_tensor", "input_norm.weight"),
        ("H02", "tensor_no_flag", "invalid", "tensor_without_flag", "input_norm.weight"),
        ("H04", "both", "invalid", "name_clash", None),
        ("H07", "extra", "invalid", "tensor_without_flag", "fc.bias"),
        ("H08", "four", "invalid", "aux_id_count", "fc.weight"),
        ("H08", "repeat", "invalid", "aux_ids_twice", None),
    ],
)
def test_published_faults(tmp_path: Path, case: str, folder: str, word: str, code: str, tensor: str | None) -> None:
    verdict = judge(make_case(case, tmp_path) / folder)
    assert (verdict.verdict, found(verdict, code).tensor) == (word, tensor)


@pytest.mark.parametrize("case", ["G01", "G02"])
def test_published_broken_heads(tmp_path: Path, case: str) -> None:
    for file in make_case(case, tmp_path).glob("*.safetensors"):
        verdict = judge(file)
        assert (verdict.verdict, verdict.findings[0].file) == ("unreadable", file.name)


def test_a_published_random_embedding(tmp_path: Path) -> None:
    case = make_case("G08", tmp_path)
    verdict = judge(case / "draft", verifier=case / "verifier")
    assert (verdict.verdict, loud(verdict)) == ("suspect", ["embedding_differs"])


def test_published_pickles_do_not_run(tmp_path: Path) -> None:
    case = make_case("K05", tmp_path)
    for file in case.rglob("*"):
        if file.is_file():
            assert judge(file).findings[0].code in ("unsafe_pickle", "no_checkpoint")
    assert not list(case.rglob("CANARY"))
