"""The judge on which files servers load, and on files made to hold it up: indexes, names, sizes."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from client.checkpoint import verify
from eagle3_core.checkpoint.judge import judge
from eagle3_core.checkpoint.sarif import to_sarif
from eagle3_core.contract.drafter_config import DrafterConfig
from eagle3_core.contract.headers import read_header
from eagle3_core.contract.jsonfiles import read_json_object
from eagle3_core.errors import BadInput, UnreadableFile
from tests.judging import OPTIMIZER, WEIGHTS, foreign, found, loud
from tests.makers import (
    DRAFTER,
    D,
    H,
    V,
    draft_ids,
    drafter_tensors,
    optimizer_state,
    raw_file,
    write_config,
    write_drafter,
    write_shards,
    write_verifier,
)

INDEX = "model.safetensors.index.json"


def sharded(tmp_path: Path) -> Path:
    """A drafter in two shards and an index."""
    path = foreign(tmp_path)
    tensors = load_file(path / WEIGHTS)
    (path / WEIGHTS).unlink()
    names = sorted(tensors)
    write_shards(path, [{name: tensors[name] for name in names[part::2]} for part in range(2)])
    return path


def put_in(path: Path) -> None:
    """Other weights, and an index that leads to them."""
    tensors = {name: -each if each.is_floating_point() else each for name, each in load_file(path / WEIGHTS).items()}
    save_file(tensors, path / "other.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "other.safetensors")}))


def test_an_index_that_leads_past_the_weights_that_were_written(tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "run")
    put_in(path)
    verdict = judge(path)
    assert verdict.verdict == "invalid"
    assert found(verdict, "digest_differs").file == "other.safetensors"


def test_an_index_that_leaves_out_the_file_transformers_takes(tmp_path: Path) -> None:
    path = foreign(tmp_path)
    put_in(path)
    verdict = judge(path)
    assert loud(verdict) == ["stray_weights"]
    assert "transformers reads it" in found(verdict, "stray_weights").message


def test_servers_load_what_lies_in_the_shards_whatever_the_index_says(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    assert judge(path).verdict == "valid"
    index = json.loads((path / INDEX).read_text())
    shard = index["weight_map"].pop("fc.weight")
    (path / INDEX).write_text(json.dumps(index))
    verdict = judge(path)
    assert loud(verdict) == ["index_differs"]
    assert found(verdict, "index_differs").message.startswith(f"fc.weight lies in {shard}")


def test_a_tensor_of_no_drafter_that_only_the_index_hides(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    shard = path / "model-00001-of-00002.safetensors"
    save_file(load_file(shard) | {"verifier_norm.weight": torch.ones(H)}, shard)
    assert found(judge(path), "unexpected_tensor").tensor == "verifier_norm.weight"


@pytest.mark.parametrize("indexed", [True, False])
def test_one_tensor_in_two_shards(tmp_path: Path, indexed: bool) -> None:
    path = sharded(tmp_path)
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    other = next(file for file in path.glob("model-*.safetensors") if file.name != weight_map["fc.weight"])
    save_file(load_file(other) | {"fc.weight": torch.zeros(H, 3 * H)}, other)
    if not indexed:
        (path / INDEX).unlink()
    verdict = judge(path)
    assert verdict.verdict == "invalid"
    told = found(verdict, "name_clash").message
    assert "fc.weight" in told
    assert all(file.name in told for file in path.glob("model-*.safetensors"))


@pytest.mark.parametrize(("weights", "stray"), [("pytorch_model.bin", "old.bin"), ("model.pt", "model_old.pt")])
def test_a_second_file_of_torch_save_is_loaded_too(tmp_path: Path, weights: str, stray: str) -> None:
    path = foreign(tmp_path)
    tensors = load_file(path / WEIGHTS)
    (path / WEIGHTS).unlink()
    torch.save(tensors, path / weights)
    torch.save(optimizer_state(tensors), path / OPTIMIZER)
    torch.save({}, path / "training_args.bin")
    assert judge(path).verdict == "valid"
    torch.save(tensors, path / stray)
    assert found(judge(path), "stray_weights").file == stray


Pairs = list[tuple[str, object]]


def json_object(pairs: Pairs) -> bytes:
    return b"{" + b",".join(f"{json.dumps(key)}:{json.dumps(value)}".encode() for key, value in pairs) + b"}"


def test_a_key_that_stands_twice_among_very_many_is_found_at_once(tmp_path: Path) -> None:
    pairs: Pairs = [(f"key{number}", 1) for number in range(200_000)]
    (tmp_path / "config.json").write_bytes(json_object([*pairs, pairs[-1]]))
    with pytest.raises(BadInput, match="'key199999' twice"):
        read_json_object(tmp_path / "config.json")
    raw_file(tmp_path / WEIGHTS, json_object([*pairs, pairs[-1]]))
    with pytest.raises(UnreadableFile, match="'key199999' twice"):
        read_header(tmp_path / WEIGHTS)


def test_a_shape_of_very_many_sizes_is_refused_before_it_is_multiplied(tmp_path: Path) -> None:
    shape = [2**60] * 200_000
    raw_file(tmp_path / WEIGHTS, {"fc.weight": {"dtype": "U8", "shape": shape, "data_offsets": [0, 0]}})
    with pytest.raises(UnreadableFile, match="200,000 dimensions"):
        read_header(tmp_path / WEIGHTS)


def test_a_config_of_very_many_keys_is_read(tmp_path: Path) -> None:
    path = foreign(tmp_path, **{f"comment_{number}": number for number in range(50_000)})
    assert judge(path).verdict == "valid"


def test_a_vocabulary_that_no_tensor_has_takes_no_memory(tmp_path: Path) -> None:
    path = foreign(tmp_path, draft_vocab_size=16_000_000)
    config = json.loads((path / "config.json").read_text())
    config["transformer_layer_config"]["vocab_size"] = 16_000_000
    write_config(path, config)
    assert found(judge(path), "shape_differs").tensor == "embed_tokens.weight"


def test_of_one_code_some_are_told_and_the_rest_counted(tmp_path: Path) -> None:
    path = foreign(tmp_path, lambda tensors: tensors.update({f"x.{number}": torch.ones(2) for number in range(250)}))
    told = [finding for finding in judge(path).findings if finding.code == "unexpected_tensor"]
    assert (len(told), told[-1].message) == (201, "50 more like these")


def test_a_name_can_neither_steer_a_terminal_nor_break_the_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = foreign(tmp_path)
    name = "\x1b[2J\ud800"
    header = {name: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}
    text = json.dumps(header).encode()
    (path / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text)
    assert verify(path, servers=True) == 2
    shown = capsys.readouterr().out
    assert "\x1b[2J" not in shown
    assert r"\x1b[2J\ud800" in shown
    verdict = judge(path)
    assert found(verdict, "unexpected_tensor").tensor == r"\x1b[2J\ud800"
    json.dumps([verdict.to_dict(), to_sarif(verdict, path, "1")], ensure_ascii=False).encode()


def manifest_twice(path: Path) -> None:
    text = (path / "manifest.json").read_text().rstrip()
    (path / "manifest.json").write_text(text.removesuffix("}") + ', "files": {}}')


def test_a_manifest_that_says_a_thing_twice_is_broken(tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "run")
    manifest_twice(path)
    assert "'files' twice" in found(judge(path), "manifest_broken").message


def test_a_path_that_cannot_be_looked_at_is_told_of_whom_it_was(tmp_path: Path) -> None:
    path, nowhere = write_drafter(tmp_path / "run"), tmp_path / ("x" * 300)
    assert loud(judge(path, previous=nowhere)) == ["previous_unreadable"]
    assert loud(judge(path, verifier=nowhere)) == ["verifier_unreadable"]
    for place in (nowhere, nowhere / WEIGHTS):
        assert (judge(place).verdict, loud(judge(place))) == ("unreadable", ["no_checkpoint"])


def inner(**changes: Any) -> dict[str, Any]:
    """A changed transformer_layer_config of the usual drafter; None stays null."""
    layer = {
        "model_type": "llama",
        "hidden_size": H,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "head_dim": 4,
        "vocab_size": V,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }
    return {"transformer_layer_config": layer | changes}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (inner(rms_norm_eps=None), "rms_norm_eps is null"),
        (inner(num_hidden_layers=None), "num_hidden_layers is null"),
        ({"eagle_config": {"use_aux_hidden_state": None}}, "use_aux_hidden_state is null"),
        (inner(rope_parameters={"rope_type": "default", "rope_theta": None}), "rope_theta is null"),
        (inner(rope_parameters={"rope_type": {"a": 1}, "rope_theta": 5e5}), "rope_type"),
        (inner(rope_parameters={"rope_type": [], "rope_theta": 5e5}), "rope_type"),
        (inner(layer_types="full_attention"), "layer_types"),
        (inner(use_sliding_window=1), "use_sliding_window"),
        ({"eagle_config": []}, "eagle_config is []"),
        ({"architectures": 0}, "architectures is 0"),
        ({"norm_output": ..., "norm_output_old": True}, "norm_output is missing"),
        ({"norm_output": ..., "norm-output": True}, "norm_output is missing"),
        ({"norm_output": ..., "_norm_output": True}, "norm_output is missing"),
    ],
)
def test_a_value_that_servers_cannot_take_and_a_key_set_aside(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    assert judge(foreign(tmp_path / "sound", **inner())).verdict == "valid"
    verdict = judge(foreign(tmp_path, **config))
    assert verdict.verdict == "invalid"
    assert words in found(verdict, "bad_config").message


def test_keys_of_other_programs_are_no_misspelt_ones(tmp_path: Path) -> None:
    config = inner(head_dim=None, v_head_size=4, index_head_dim=4, mlp_layer_types=["dense"], sliding_window_pattern=6)
    assert judge(foreign(tmp_path, **config)).verdict == "valid"


def test_what_stands_in_a_section_that_no_server_reads_is_no_edit(tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "run")
    config = json.loads((path / "config.json").read_text())
    write_config(path, config | {"training_args": {"factor": 2, "norm_output": True}})
    assert judge(path).verdict == "valid"


def test_a_kind_of_attention_nobody_knows_is_not_judged(tmp_path: Path) -> None:
    verdict = judge(foreign(tmp_path, **inner(layer_types=["chunked"])))
    assert found(verdict, "unsupported_part").message.startswith("config.json: layer_types ['chunked']")


def test_a_full_vocabulary_with_a_head_is_not_tied(tmp_path: Path) -> None:
    config = DrafterConfig.model_validate(DRAFTER.model_dump() | {"draft_vocab_size": V})
    path = write_drafter(tmp_path / "run", config=config)
    (path / "manifest.json").unlink()
    said = json.loads((path / "config.json").read_text())
    write_config(path, said | {"tie_word_embeddings": True})
    assert "lm_head.weight is stored" in found(judge(path), "tied_head").message


def test_draft_ids_follow_t2d_in_every_format_that_has_it(tmp_path: Path) -> None:
    def permute(tensors: dict[str, Tensor]) -> None:
        ids = draft_ids()[torch.arange(D).roll(1)]
        tensors["d2t"] = ids - torch.arange(D)

    path = foreign(tmp_path, permute)
    said = json.loads((path / "config.json").read_text())
    flat = said.pop("transformer_layer_config") | {"architectures": ["Eagle3LlamaForCausalLM"], "model_type": "llama"}
    write_config(path, {key: said[key] for key in said if not key.startswith("speculators")} | flat)
    assert found(judge(path), "d2t_not_ascending").tensor == "d2t"


def test_denormal_numbers_are_as_good_as_zeros(tmp_path: Path) -> None:
    path = foreign(tmp_path, lambda tensors: tensors.update({"norm.weight": torch.full((H,), 1e-38).bfloat16()}))
    assert found(judge(path), "all_zero").tensor == "norm.weight"


def test_an_exponent_bit_in_half_precision_is_no_trained_value(tmp_path: Path) -> None:
    def flip(tensors: dict[str, Tensor]) -> None:
        tensors["fc.weight"] = tensors["fc.weight"].half()
        tensors["fc.weight"][0, 0] = 0.015
        assert judge(path_of(tensors)).verdict == "valid"
        tensors["fc.weight"].view(torch.int16)[0, 0] ^= 1 << 14

    def path_of(tensors: dict[str, Tensor]) -> Path:
        return foreign(tmp_path / "sound", lambda mine: mine.update(tensors))

    assert found(judge(foreign(tmp_path, flip)), "extreme_values").tensor == "fc.weight"


def last_epochs(tmp_path: Path, frozen_head: bool, change: Callable[[dict[str, Tensor]], object]) -> tuple[Path, Path]:
    """Two epochs a step apart, as others write them; the later one changed after it was written."""
    verifier = write_verifier(tmp_path / "verifier")
    head = load_file(verifier / WEIGHTS)["lm_head.weight"][draft_ids()]
    epochs = []
    for epoch in (0, 1):
        step = drafter_tensors(seed=200 + epoch)
        tensors = {
            name: (each.float() + 0.02 * step[name].float()).bfloat16() if each.dim() == 2 else each
            for name, each in drafter_tensors().items()
        }
        tensors |= {"lm_head.weight": head.clone(), "embed_tokens.weight": drafter_tensors()["embed_tokens.weight"]}
        trained = {name: each for name, each in tensors.items() if name != "lm_head.weight" or not frozen_head}
        state = optimizer_state(trained, epoch + 1)
        path = write_drafter(tmp_path / "run", epoch, tensors=tensors, optimizer=state, steps=epoch + 1)
        (path / "manifest.json").unlink()
        epochs.append(path)
    tensors = load_file(epochs[1] / WEIGHTS)
    change(tensors)
    save_file(tensors, epochs[1] / WEIGHTS, metadata={"format": "pt"})
    return epochs[1], epochs[0]


NAME = "layers.0.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.update({NAME: tensors[NAME].roll(1, 0)}),
        lambda tensors: tensors.update({NAME: tensors[NAME].T.contiguous()}),
        lambda tensors: tensors.update({NAME: -tensors[NAME]}),
    ],
)
def test_a_matrix_in_another_order_is_told_from_a_trained_one(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object]
) -> None:
    checkpoint, previous = last_epochs(tmp_path, False, change)
    verdict = judge(checkpoint, previous=previous)
    assert loud(verdict) == ["matrix_replaced"]
    assert found(verdict, "matrix_replaced").tensor == NAME


def test_a_head_that_was_not_trained_is_the_one_before_and_the_verifiers(tmp_path: Path) -> None:
    def flip(tensors: dict[str, Tensor]) -> None:
        bits = tensors["lm_head.weight"].view(torch.int16)
        bits[5, 3] ^= 1

    checkpoint, previous = last_epochs(tmp_path, True, flip)
    assert loud(judge(previous, verifier=tmp_path / "verifier")) == []
    assert found(judge(checkpoint, previous=previous), "frozen_tensor_changed").tensor == "lm_head.weight"
    assert "draft ids [5]" in found(judge(checkpoint, verifier=tmp_path / "verifier"), "head_rows_differ").message


@pytest.mark.parametrize(
    ("place", "key", "value", "words"),
    [
        ("group", "lr", "x", "learning rate is no number"),
        ("group", "lr", torch.tensor(float("nan")), "learning rate is nan"),
        ("group", "betas", (float("nan"), 0.9), "beta is nan"),
        ("state", "step", "x", "the step of fc.weight is no number"),
    ],
)
def test_an_optimizer_whose_settings_are_no_numbers(
    tmp_path: Path, place: str, key: str, value: object, words: str
) -> None:
    path = write_drafter(tmp_path / "run")
    (path / "manifest.json").unlink()
    state = torch.load(path / OPTIMIZER, weights_only=True)
    group = state["param_groups"][0]
    target = group if place == "group" else state["state"][group["param_names"].index("fc.weight")]
    target[key] = value
    torch.save(state, path / OPTIMIZER)
    assert words in found(judge(path), "optimizer_mismatch").message


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "module._orig_mod.", "_fsdp_wrapped_module."])
def test_names_that_a_wrapper_of_training_lengthened_are_told_in_one_finding(tmp_path: Path, wrapper: str) -> None:
    path = write_drafter(tmp_path)
    tensors = load_file(path / "model.safetensors")
    save_file({f"{wrapper}{name}": tensor for name, tensor in tensors.items()}, path / "model.safetensors")
    (path / "manifest.json").unlink()
    errors = [finding for finding in judge(path).findings if finding.severity == "error"]
    assert [error.code for error in errors if error.file == "model.safetensors"] == ["unexpected_tensor"]
    assert f"every name begins with '{wrapper}'" in errors[0].message


@pytest.mark.parametrize(
    ("instead", "scheme"),
    [
        (("weight_packed", "weight_scale", "weight_shape"), "compressed-tensors, packed integers"),
        (("qweight", "qzeros", "scales"), "GPTQ/AWQ, packed integers"),
        (("weight", "weight_scale"), "scaled integers or FP8"),
    ],
)
def test_a_quantised_matrix_is_named_with_its_scheme(tmp_path: Path, instead: tuple[str, ...], scheme: str) -> None:
    path = write_drafter(tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors |= {f"fc.{part}": torch.zeros(4, 4, dtype=torch.int32) for part in instead}
    if "weight" not in instead:
        del tensors["fc.weight"]
    save_file(tensors, path / "model.safetensors")
    (path / "manifest.json").unlink()
    told = [finding for finding in judge(path).findings if finding.file == "model.safetensors"]
    errors = [finding for finding in told if finding.severity == "error"]
    assert [error.tensor for error in errors] == ["fc.weight"]
    assert f"fc.weight is quantised ({scheme})" in errors[0].message


def test_an_index_of_pickled_shards_that_names_what_is_not_there_is_stale(tmp_path: Path) -> None:
    path = write_drafter(tmp_path)
    tensors = load_file(path / "model.safetensors")
    for name in ("model.safetensors", "manifest.json"):
        (path / name).unlink()
    torch.save(tensors, path / "pytorch_model-00001-of-00001.bin")
    index = dict.fromkeys([*tensors, "ghost.weight"], "pytorch_model-00001-of-00001.bin")
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    assert "stale index: ghost.weight is not in pytorch_model-00001" in judge(path).errors()
