"""The judge: every fault is named by file and tensor, and sound checkpoints of all kinds pass."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3_core.checkpoint.findings import CODES
from eagle3_core.checkpoint.judge import judge
from eagle3_core.contract.headers import read_header
from tests.cases import peer_checkpoint
from tests.judging import OPTIMIZER, WEIGHTS, drop, foreign, found, loud, put
from tests.makers import (
    DRAFTER,
    D,
    H,
    V,
    drafter_tensors,
    random,
    write_drafter,
    write_verifier,
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_drafter(tmp_path / "run")


# ---------------------------------------------------------------- sound checkpoints


def test_what_training_writes_is_valid(checkpoint: Path) -> None:
    verdict = judge(checkpoint)
    assert verdict.verdict == "valid"
    assert loud(verdict) == []


def test_with_previous_and_verifier_it_is_still_valid(tmp_path: Path) -> None:
    first = write_drafter(tmp_path, 0, steps=1)
    second = write_drafter(tmp_path, 1, tensors=drafter_tensors(seed=50), steps=2)
    verdict = judge(second, previous=first, verifier=write_verifier(tmp_path / "verifier"))
    assert (verdict.verdict, loud(verdict)) == ("valid", [])


def test_an_output_directory_means_its_latest_epoch(tmp_path: Path) -> None:
    for epoch in (0, 2, 10):
        write_drafter(tmp_path, epoch)
    (tmp_path / "10" / WEIGHTS).write_bytes(b"")
    verdict = judge(tmp_path)
    assert "10/" in found(verdict, "latest_judged").message
    assert found(verdict, "truncated_file").file == f"10/{WEIGHTS}"


def test_a_lone_weight_file(checkpoint: Path) -> None:
    assert judge(checkpoint / WEIGHTS).to_dict() == {"verdict": "valid", "level": "full", "findings": [], "servers": []}


@pytest.mark.parametrize(
    ("name", "word", "codes"),
    [
        ("speculators-0.9.0/0", "valid", []),
        ("speculators-0.9.0", "valid", []),
        ("speculators-0.3.0/0", "suspect", ["aux_ids_off_by_one", "not_served"]),
        ("specforge-hf", "valid", []),
        ("specforge-sglang", "valid", []),
        ("modelopt", "valid", []),
        ("eagle-official", "valid", []),
    ],
)
def test_real_checkpoints_of_peers(name: str, word: str, codes: list[str]) -> None:
    verdict = judge(peer_checkpoint(name))
    assert (verdict.verdict, loud(verdict)) == (word, codes)


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("name", ["fc.weight", "d2t", "layers.0.mlp.down_proj.weight", "norm.weight"])
def test_a_flipped_byte_is_named_by_file_and_tensor(checkpoint: Path, name: str) -> None:
    file = checkpoint / WEIGHTS
    content = bytearray(file.read_bytes())
    content[read_header(file).tensors[name].start] ^= 1
    file.write_bytes(content)
    verdict = judge(checkpoint)
    finding = found(verdict, "digest_differs")
    assert (verdict.verdict, finding.file, finding.tensor) == ("invalid", WEIGHTS, name)
    assert [f.tensor for f in verdict.findings if f.code == "digest_differs"] == [name]


@pytest.mark.parametrize("name", ["config.json", OPTIMIZER, "scheduler_state_dict.pt", "generation_config.json"])
def test_a_flipped_byte_elsewhere_is_named_by_file(checkpoint: Path, name: str) -> None:
    file = checkpoint / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    verdict = judge(checkpoint)
    told = {f.file for f in verdict.findings if f.code in ("digest_differs", "config_edited")}
    assert (verdict.verdict, told) == ("invalid", {name})


def test_truncated_files_are_named(checkpoint: Path) -> None:
    file = checkpoint / WEIGHTS
    tensors = read_header(file).tensors
    last = max(tensors, key=lambda name: tensors[name].end)
    file.write_bytes(file.read_bytes()[:-1])
    verdict = judge(checkpoint)
    assert verdict.verdict == "unreadable"
    assert found(verdict, "size_differs").file == WEIGHTS
    finding = found(verdict, "truncated_file")
    assert (finding.file, finding.tensor) == (WEIGHTS, last)


@pytest.mark.parametrize("name", ["config.json", OPTIMIZER, "scheduler_state_dict.pt", "generation_config.json"])
def test_missing_and_short_files_are_named(checkpoint: Path, name: str) -> None:
    file = checkpoint / name
    file.write_bytes(file.read_bytes()[:-5])
    assert found(judge(checkpoint), "size_differs").file == name
    file.unlink()
    verdict = judge(checkpoint)
    assert (verdict.verdict, found(verdict, "missing_file").file) == ("invalid", name)


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"schema_version": 9, "files": {}}', '{"schema_version": 1, "files": {"../x": {}}}']
)
def test_a_broken_manifest(checkpoint: Path, content: str) -> None:
    (checkpoint / "manifest.json").write_text(content)
    assert found(judge(checkpoint), "manifest_broken").file == "manifest.json"


@pytest.mark.parametrize(
    ("key", "code"), [("comment", "config_note"), ("logit_scale", "config_edited"), ("layer_ids", "config_edited")]
)
def test_a_key_that_was_added_is_an_error_where_a_server_reads_it(checkpoint: Path, key: str, code: str) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: 2}))
    told = [finding.code for finding in judge(checkpoint).findings if finding.message.startswith(f"{key} is 2, was")]
    assert told == [code]


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda file: file.symlink_to("nowhere")])
def test_a_manifest_that_is_no_file(checkpoint: Path, make: Callable[[Path], None]) -> None:
    (checkpoint / "manifest.json").unlink()
    make(checkpoint / "manifest.json")
    assert "not a regular file" in found(judge(checkpoint), "manifest_broken").message


def test_what_lies_beside_is_told_and_never_executed(checkpoint: Path) -> None:
    (checkpoint / "config.py").write_text("raise SystemExit('executed')")
    (checkpoint / "notes.txt").write_text("hello")
    verdict = judge(checkpoint)
    assert verdict.verdict == "valid"
    assert found(verdict, "custom_code").file == "config.py"
    assert found(verdict, "unlisted_file").file == "notes.txt"


@pytest.mark.parametrize("target", ["", "absent", "empty", "notes.txt"])
def test_what_is_no_checkpoint(tmp_path: Path, target: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    verdict = judge(tmp_path / target)
    assert (verdict.verdict, verdict.findings[0].code) == ("unreadable", "no_checkpoint")


# ---------------------------------------------------------------- names, shapes, dtypes


@pytest.mark.parametrize(
    "name",
    ["fc.weight", "lm_head.weight", "norm.weight", "layers.0.hidden_norm.weight", "embed_tokens.weight", "d2t", "t2d"],
)
def test_a_missing_tensor(tmp_path: Path, name: str) -> None:
    verdict = judge(foreign(tmp_path, drop(name)))
    finding = found(verdict, "missing_tensor")
    assert (verdict.verdict, finding.file, finding.tensor) == ("invalid", WEIGHTS, name)


@pytest.mark.parametrize(
    ("name", "tensor", "code", "words"),
    [
        ("verifier_norm.weight", torch.ones(H), "unexpected_tensor", "verifier_norm"),
        ("input_norm.weight", torch.ones(3 * H), "tensor_without_flag", "norm_before_fc"),
        ("fc_norm.0.weight", torch.ones(H), "tensor_without_flag", "fc_norm"),
        ("layers.0.self_attn.q_proj.bias", torch.ones(H), "tensor_without_flag", "attention_bias"),
        ("fc.bias", torch.ones(H), "tensor_without_flag", "fc_bias"),
        ("fc.weight", random(H, 4 * H), "aux_id_count", "64 columns"),
        ("fc.weight", random(H, 3 * H).to(torch.int64), "dtype_differs", "I64"),
        ("lm_head.weight", random(D + 1, H), "shape_differs", "draft_vocab_size 24"),
        ("embed_tokens.weight", random(V - 1, H), "shape_differs", "vocab_size 64"),
        ("layers.0.self_attn.q_proj.weight", random(32, 2 * H), "shape_differs", "num_attention_heads 4 x head_dim 4"),
        ("layers.0.self_attn.k_proj.weight", random(4, 2 * H), "shape_differs", "num_key_value_heads 2 x head_dim 4"),
        ("layers.0.mlp.up_proj.weight", random(31, H), "shape_differs", "intermediate_size 32"),
        ("norm.weight", torch.ones(H + 1), "shape_differs", "hidden_size 16"),
        ("d2t", torch.zeros(D), "dtype_differs", "F32"),
        ("t2d", torch.zeros(V, dtype=torch.uint8), "dtype_differs", "U8"),
        ("t2d", torch.zeros(V, 1, dtype=torch.bool), "shape_differs", "[64, 1]"),
        ("d2t", torch.zeros(D - 9, dtype=torch.int64), "map_length", "[15], expected [24]"),
    ],
)
def test_a_tensor_that_does_not_belong_or_fit(tmp_path: Path, name: str, tensor: Tensor, code: str, words: str) -> None:
    verdict = judge(foreign(tmp_path, put(name, tensor)))
    finding = found(verdict, code)
    assert (verdict.verdict, finding.tensor) == ("invalid", name)
    assert words in finding.message


@pytest.mark.parametrize(
    ("config", "code", "words"),
    [
        ({"norm_before_fc": True}, "flag_without_tensor", "input_norm.weight"),
        ({"fc_norm": True}, "flag_without_tensor", "fc_norm.0.weight"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 5, 8]}, "aux_id_count", "4 layer ids"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 2, 5]}, "aux_ids_twice", "[2, 2, 5]"),
        ({"eagle_aux_hidden_state_layer_ids": [5, 4, 2]}, "aux_ids_not_ascending", "[5, 4, 2]"),
        ({"eagle_aux_hidden_state_layer_ids": ["2"]}, "bad_config", "layer_ids"),
        ({"draft_vocab_size": V + 1}, "bad_config", "larger than vocab_size"),
        ({"draft_vocab_size": 0}, "bad_config", "draft_vocab_size is 0"),
        ({"transformer_layer_config": None}, "bad_config", "transformer_layer_config"),
        ({"norm_before_residual": ...}, "flag_not_stated", "norm_before_residual"),
        ({"tie_word_embeddings": "true"}, "bad_config", "tie_word_embeddings is 'true'"),
        ({"architectures": "Eagle3DraftModel"}, "bad_config", "not a list of names"),
        ({"eagle_config": "x"}, "bad_config", "eagle_config is 'x'"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "unsupported_part", "use_aux_hidden_state is False"),
        ({"logit_scale": 0.5}, "unsupported_part", "logit_scale is 0.5"),
        ({"norm_output": ..., "norm_outputs": True}, "bad_config", "norm_output is missing"),
        ({"Norm_Output": True, "norm_output": ...}, "bad_config", "norm_output is missing"),
    ],
)
def test_a_config_that_contradicts_itself_or_the_tensors(
    tmp_path: Path, config: dict[str, Any], code: str, words: str
) -> None:
    verdict = judge(foreign(tmp_path, **config))
    assert verdict.verdict == ("suspect" if CODES[code][0] == "warning" else "invalid")
    finding = found(verdict, code)
    assert words in finding.message or words == finding.tensor


YARN = {"rope_type": "yarn", "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("sizes", "code", "words"),
    [
        ({"rms_norm_eps": "1e-5"}, "bad_config", "rms_norm_eps is '1e-5'"),
        ({"rms_norm_eps": -1e-5}, "bad_config", "rms_norm_eps is -1e-05"),
        ({"rms_norm_eps": True}, "bad_config", "rms_norm_eps is True"),
        ({"max_position_embeddings": 0}, "bad_config", "max_position_embeddings is 0"),
        ({"max_position_embeddings": "2048"}, "bad_config", "max_position_embeddings is '2048'"),
        ({"attention_bias": "false"}, "bad_config", "attention_bias is 'false'"),
        ({"hidden_act": "gelu"}, "unsupported_part", "hidden_act is 'gelu'"),
        ({"rope_theta": 5.0}, "bad_config", "rope_theta is 5.0"),
        ({"rope_parameters": YARN, "rope_scaling": None}, "bad_config", "factor is missing"),
        ({"rope_parameters": YARN | {"factor": "32"}, "rope_scaling": None}, "bad_config", "factor of rope is '32'"),
        ({"rope_scaling": YARN | {"factor": 32}}, "bad_config", "rope_parameters and rope_scaling differ"),
        ({"partial_rotary_factor": 0.5}, "unsupported_part", "partial_rotary_factor is 0.5"),
    ],
)
def test_sizes_and_rope_that_servers_would_take_otherwise_or_not_at_all(
    tmp_path: Path, sizes: dict[str, Any], code: str, words: str
) -> None:
    layer = json.loads((write_drafter(tmp_path / "plain") / "config.json").read_text())["transformer_layer_config"]
    verdict = judge(foreign(tmp_path, transformer_layer_config=layer | sizes))
    assert verdict.verdict == ("suspect" if CODES[code][0] == "warning" else "invalid")
    assert words in found(verdict, code).message


def test_the_number_of_states_that_fc_takes_is_told(tmp_path: Path) -> None:
    finding = found(judge(foreign(tmp_path, eagle_aux_hidden_state_layer_ids=[2, 4, 5, 6])), "aux_id_count")
    assert finding.message.endswith("; 3 states would fit")


def test_a_full_vocabulary(tmp_path: Path) -> None:
    config = DRAFTER.model_copy(update={"draft_vocab_size": V})
    path = write_drafter(tmp_path, config=config)
    assert judge(path).verdict == "valid"
    (path / "manifest.json").unlink()
    tensors = load_file(path / WEIGHTS)
    save_file(tensors | {"d2t": torch.zeros(V, dtype=torch.int64)}, path / WEIGHTS)
    assert found(judge(path), "unexpected_tensor").tensor == "d2t"
    del tensors["lm_head.weight"]
    save_file(tensors, path / WEIGHTS)
    (path / OPTIMIZER).unlink()
    verdict = judge(path)
    assert (verdict.verdict, loud(verdict)) == ("suspect", ["head_absent"])


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("name", "value", "counts"),
    [("norm.weight", float("nan"), "1 NaN and 0 Inf"), ("fc.weight", float("-inf"), "0 NaN and 1 Inf")],
)
def test_values_that_are_not_finite_are_counted(tmp_path: Path, name: str, value: float, counts: str) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[3] = value

    verdict = judge(foreign(tmp_path, change))
    finding = found(verdict, "not_finite")
    assert (verdict.verdict, finding.file, finding.tensor) == ("invalid", WEIGHTS, name)
    assert counts in finding.message


@pytest.mark.parametrize(
    ("name", "tensor", "code"),
    [
        ("lm_head.weight", torch.zeros(D, H), "all_zero"),
        ("norm.weight", torch.zeros(H), "all_zero"),
        ("fc.weight", torch.full((H, 3 * H), 0.01), "constant"),
        ("fc.weight", torch.cat([torch.zeros(2, 3 * H), random(H - 2, 3 * H, dtype=torch.float32)]), "zero_rows"),
        ("fc.weight", random(H, 3 * H).index_fill(0, torch.tensor([1]), 3e38), "extreme_values"),
    ],
)
def test_values_that_were_lost_are_suspect(tmp_path: Path, name: str, tensor: Tensor, code: str) -> None:
    verdict = judge(foreign(tmp_path, put(name, tensor)))
    assert verdict.verdict == "suspect"
    assert (found(verdict, code).file, found(verdict, code).tensor) == (WEIGHTS, name)


def test_a_zeroed_tensor_in_a_written_checkpoint_is_named_by_digest_and_value(checkpoint: Path) -> None:
    file = checkpoint / WEIGHTS
    tensors = load_file(file)
    save_file(tensors | {"fc.weight": torch.zeros_like(tensors["fc.weight"])}, file, metadata={"format": "pt"})
    verdict = judge(checkpoint)
    assert found(verdict, "digest_differs").tensor == "fc.weight"
    assert found(verdict, "all_zero").tensor == "fc.weight"


def test_padding_rows_of_the_embedding_are_no_fault(tmp_path: Path) -> None:
    verdict = judge(foreign(tmp_path, put("embed_tokens.weight", random(V, H).index_fill(0, torch.tensor([0, 7]), 0))))
    assert verdict.verdict == "valid"
    assert "2 rows" in found(verdict, "zero_embedding_rows").message
    half = random(V, H).index_fill(0, torch.arange(V // 2), 0)
    assert loud(judge(foreign(tmp_path / "half", put("embed_tokens.weight", half)))) == ["zero_rows"]


@pytest.mark.parametrize("manifest", [True, False])
def test_a_second_weight_file_that_servers_would_load_as_well(checkpoint: Path, manifest: bool) -> None:
    if not manifest:
        (checkpoint / "manifest.json").unlink()
    (checkpoint / "._model.safetensors").write_bytes(b"left by a file manager")
    assert judge(checkpoint).verdict == "valid"
    save_file({"fc.weight": torch.ones(H, 3 * H)}, checkpoint / "model-old.safetensors")
    finding = found(judge(checkpoint), "stray_weights")
    assert (finding.severity, finding.file) == ("warning", "model-old.safetensors")
    weight_map = dict.fromkeys(load_file(checkpoint / WEIGHTS), WEIGHTS)
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert judge(checkpoint).verdict == "valid", "vLLM follows the index"


def test_a_byte_order_mark_that_servers_do_not_read(tmp_path: Path) -> None:
    path = foreign(tmp_path)
    config = path / "config.json"
    config.write_bytes(b"\xef\xbb\xbf" + config.read_bytes())
    assert "byte order mark" in found(judge(path), "bad_config").message


def test_a_plain_model_is_judged_by_its_weights_unless_a_drafter_is_expected(tmp_path: Path) -> None:
    for name, scale in (("1", 1.0), ("2", 2.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
        weights = {"model.embed_tokens.weight": torch.arange(1.0, 33).reshape(4, 8) * scale}
        save_file(weights, tmp_path / name / "model.safetensors")
    verdict = judge(tmp_path / "2", previous=tmp_path / "1", expect_drafter=False)
    assert (verdict.verdict, [one.severity for one in verdict.findings]) == ("valid", ["info"] * len(verdict.findings))
    assert "not_a_drafter" in [one.code for one in verdict.findings]
    assert judge(tmp_path / "2").verdict == "invalid"
    assert "weights_unchanged" in [
        f.code for f in judge(tmp_path / "2", previous=tmp_path / "2", expect_drafter=False).findings
    ]
    (tmp_path / "2" / "model.safetensors").write_bytes(b"torn")
    assert judge(tmp_path / "2", expect_drafter=False).verdict == "unreadable"
    (tmp_path / "1" / "config.json").write_text("{torn")
    assert judge(tmp_path / "1", expect_drafter=False).verdict == "invalid"


def test_specforges_runtime_state_is_judged_by_its_tensors(tmp_path: Path) -> None:
    state = {"draft_state_dict": {"fc.weight": torch.arange(1.0, 9).reshape(2, 4)}, "global_step": 8, "epoch": 0}
    torch.save(state, tmp_path / "training_state.pt")
    assert judge(tmp_path, expect_drafter=False).verdict == "valid"
    state["draft_state_dict"]["fc.weight"][0, 0] = float("nan")
    torch.save(state, tmp_path / "training_state.pt")
    assert "not_finite" in [one.code for one in judge(tmp_path, expect_drafter=False).findings]
