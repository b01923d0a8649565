"""Two checkpoints compared by what they mean: other names, order and files are the same; one changed value is not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from client.convert import convert as convert_command
from client.convert import diff as diff_command
from eagle3_core.checkpoint.compare import compare
from eagle3_core.checkpoint.convert import convert
from eagle3_core.errors import CheckpointError
from tests.judging import WEIGHTS, drop, foreign, put
from tests.makers import D, H, V, random, write_drafter, write_verifier


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    return write_drafter(tmp_path / "ours")


def only(one: Path, other: Path, **options: Any) -> tuple[str, str, float | None]:
    """The one difference between two checkpoints."""
    found = compare(one, other, **options)
    assert len(found.differences) == 1, found.to_dict()
    [difference] = found.differences
    return difference.what, difference.message, difference.max_abs


def test_one_value_of_one_tensor(tmp_path: Path, ours: Path) -> None:
    changed = load_file(ours / WEIGHTS)["fc.weight"].clone()
    changed[3, 7] += 0.5
    what, message, largest = only(ours, foreign(tmp_path, put("fc.weight", changed)))
    assert what == "fc.weight"
    assert message.startswith("1 values differ, by 0.")
    assert largest == pytest.approx(0.5, rel=0.05)


def test_two_rows_of_the_head_that_changed_places(tmp_path: Path, ours: Path) -> None:
    head = load_file(ours / WEIGHTS)["lm_head.weight"]
    swapped = head[[1, 0, *range(2, D)]].clone()
    assert only(ours, foreign(tmp_path, put("lm_head.weight", swapped)))[0] == "lm_head.weight"


def test_another_map(tmp_path: Path, ours: Path) -> None:
    tensors = load_file(ours / WEIGHTS)
    tokens = torch.arange(D) + tensors["d2t"]
    absent = next(token for token in range(V) if token not in tokens and token > int(tokens[-2]))
    tokens[-1] = absent
    kept = torch.zeros(V, dtype=torch.bool)
    kept[tokens] = True

    def change(held: dict[str, torch.Tensor]) -> None:
        held |= {"d2t": tokens - torch.arange(D), "t2d": kept}

    found = compare(ours, foreign(tmp_path, change))
    assert found.differences[0].what == "d2t"
    assert f"1 only the second [{absent}]" in found.differences[0].message


@pytest.mark.parametrize(
    ("config", "what", "words"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}, "eagle_aux_hidden_state_layer_ids", "states [2, 4, 6]"),
        ({"norm_before_residual": True}, "norm_before_residual", "False and True"),
        ({"norm_output": True}, "norm_output", "False and True"),
    ],
)
def test_config_keys_that_mean_something(
    tmp_path: Path, ours: Path, config: dict[str, Any], what: str, words: str
) -> None:
    found = only(ours, foreign(tmp_path, **config))
    assert found[0] == what
    assert words in found[1]


def test_what_a_drafter_is_called_means_nothing(tmp_path: Path, ours: Path) -> None:
    other = foreign(tmp_path, speculators_version="0.7.0", transformers_version="5.0.0", dtype="float32")
    assert compare(ours, other).equal


def test_a_rope_base_means_something(tmp_path: Path, ours: Path) -> None:
    layer = json.loads((ours / "config.json").read_text())["transformer_layer_config"]
    layer |= {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    assert only(ours, foreign(tmp_path, transformer_layer_config=layer))[0] == "rope"


def test_rounding_is_told_and_may_be_allowed(tmp_path: Path, ours: Path) -> None:
    tensors = load_file(ours / WEIGHTS)
    wider = foreign(tmp_path, put("fc.weight", tensors["fc.weight"].float()))
    found = compare(ours, wider)
    assert found.equal
    assert "fc.weight: the same values as BF16 and F32" in found.notes
    rounded = tensors["fc.weight"].float() + 1e-4
    save_file(load_file(wider / WEIGHTS) | {"fc.weight": rounded}, wider / WEIGHTS)
    assert only(ours, wider)[2] == pytest.approx(1e-4, rel=0.01)
    assert compare(ours, wider, tolerance=1e-3).equal


def test_an_embedding_left_to_the_verifier(tmp_path: Path, ours: Path) -> None:
    without = convert(foreign(tmp_path, drop()), tmp_path / "vllm", "vllm").path
    tensors = load_file(without / WEIGHTS)
    del tensors["embed_tokens.weight"]
    save_file(tensors, without / WEIGHTS)
    (without / "manifest.json").unlink()
    found = compare(ours, without)
    assert found.equal
    assert any(note.startswith("embed_tokens.weight is only in the first") for note in found.notes)
    verifier = write_verifier(tmp_path / "verifier")
    assert compare(ours, without, verifier=verifier).equal
    other = write_verifier(
        tmp_path / "other",
        load_file(verifier / WEIGHTS) | {"model.embed_tokens.weight": random(V, H, seed=8)},
    )
    assert only(ours, without, verifier=other)[0] == "embed_tokens.weight"


def test_default_states_are_the_same_as_none_once_the_verifier_is_known(tmp_path: Path, ours: Path) -> None:
    silent = foreign(tmp_path, eagle_aux_hidden_state_layer_ids=None)
    assert only(ours, silent)[0] == "eagle_aux_hidden_state_layer_ids"
    assert compare(ours, silent, verifier=write_verifier(tmp_path / "verifier")).equal


def test_states_of_speculators_0_3_are_their_own(tmp_path: Path, ours: Path) -> None:
    old = foreign(tmp_path, eagle_aux_hidden_state_layer_ids=None, speculators_version="0.3.0")
    assert compare(old, old).equal
    assert "those of speculators 0.3" in only(ours, old)[1]
    assert "states [3, 5, 6]" in only(ours, old, verifier=write_verifier(tmp_path / "verifier"))[1]


def test_a_damaged_one_cannot_be_compared(tmp_path: Path, ours: Path) -> None:
    with pytest.raises(CheckpointError, match="missing_tensor"):
        compare(ours, foreign(tmp_path, drop("fc.weight")))


# ---------------------------------------------------------------- at the command line


def test_the_diff_command(tmp_path: Path, ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = foreign(tmp_path, put("norm.weight", torch.full((H,), 2.0).bfloat16()))
    assert diff_command(ours, ours, None, 0.0, False) == 0
    assert "they mean the same" in capsys.readouterr().out
    assert diff_command(ours, other, None, 0.0, False) == 1
    assert "norm.weight: 16 values differ, by 1 at most" in capsys.readouterr().out
    assert diff_command(ours, other, None, 0.0, True) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["equal"], told["differences"][0]["max_abs"]) == (False, 1.0)
    assert diff_command(ours, tmp_path / "absent", None, 0.0, False) == 2
    assert "does not exist" in capsys.readouterr().err


def test_the_convert_command(tmp_path: Path, ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(name: str, target: Any, ids: str | None = None, as_json: bool = False) -> int:
        return convert_command(ours, tmp_path / name, target, None, "a/b", ids, None, as_json)

    assert run("both", "both", as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["from"], told["to"], told["verdict"]) == ("speculators", "both", "valid")
    assert {one["server"]: one["outcome"] for one in told["servers"]}["sglang"] == "loads"
    assert run("again", "vllm") == 0
    assert "what it does" in capsys.readouterr().out
    assert run("both", "both") == 2
    assert "is not empty" in capsys.readouterr().err
    assert run("eagle", "eagle") == 2
    assert "the verifier would tell" in capsys.readouterr().err
    assert run("wrong", "vllm", "2,x") == 2
    assert "--aux-layer-ids 2,x" in capsys.readouterr().err


def test_a_difference_that_is_no_number_is_null_in_json(
    tmp_path: Path, ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = foreign(tmp_path, put("norm.weight", torch.full((H,), torch.nan).bfloat16()))
    assert diff_command(ours, other, None, 0.0, True) == 1
    [told] = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["differences"]
    assert (told["what"], told["max_abs"]) == ("norm.weight", None)
