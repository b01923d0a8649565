"""Checkpoints on disk: what is written, what is read back, and what foreign formats mean."""

import errno
import json
import os
import pickle
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from eagle3_core.checkpoint.format import read_drafter_config, read_drafter_tensors, write_checkpoint
from eagle3_core.contract.drafter_config import expected_tensors
from eagle3_core.contract.drafter_files import describe_drafter
from eagle3_core.contract.headers import read_header
from eagle3_core.errors import CheckpointError, UnreadableFile
from tests.cases import make_case, peer_checkpoint
from tests.makers import DRAFTER, H, V, drafter_tensors, optimizer_state, write_config, write_drafter

FILES = {
    "config.json",
    "generation_config.json",
    "manifest.json",
    "model.safetensors",
    "optimizer_state_dict.pt",
    "scheduler_state_dict.pt",
}

HF_STYLE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": V,
    "draft_vocab_size": 24,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 512,
}


def hf_style(directory: Path, **changes: Any) -> Path:
    merged = {**HF_STYLE, **changes}
    return write_config(directory, {key: value for key, value in merged.items() if value is not None})


# ---------------------------------------------------------------- writing


def test_a_written_checkpoint_reads_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    path = write_drafter(tmp_path, 3, tensors=tensors)
    assert path == tmp_path / "3"
    assert {file.name for file in path.iterdir()} == FILES
    assert [entry.name for entry in tmp_path.iterdir()] == ["3"]
    read = read_drafter_tensors(path)
    assert read.keys() == expected_tensors(DRAFTER).keys()
    assert all(torch.equal(read[name], tensors[name]) and read[name].dtype == tensors[name].dtype for name in read)
    source = read_drafter_config(path)
    assert source.config == DRAFTER
    assert (source.format, source.verifier_name) == ("speculators", "verifier")
    state = torch.load(path / "optimizer_state_dict.pt", weights_only=True)
    assert state["state"][0]["exp_avg"].dtype == torch.float32


def test_floats_become_bf16(tmp_path: Path) -> None:
    tensors = {name: t.double() if t.is_floating_point() else t for name, t in drafter_tensors().items()}
    saved = load_file(write_drafter(tmp_path, tensors=tensors) / "model.safetensors")
    kinds = {"d2t": torch.int64, "t2d": torch.bool}
    assert all(tensor.dtype == kinds.get(name, torch.bfloat16) for name, tensor in saved.items())


def test_the_config_is_the_one_peers_write(tmp_path: Path) -> None:
    config = json.loads((write_drafter(tmp_path) / "config.json").read_text())
    peer = json.loads((peer_checkpoint("speculators-0.9.0") / "0" / "config.json").read_text())
    assert config.keys() == peer.keys() - {"auto_map"}
    layer, other = config["transformer_layer_config"], peer["transformer_layer_config"]
    # Full attention: no window. rope_theta stands beside rope_parameters for readers of the older layout.
    assert layer.keys() == other.keys() - {"layer_types", "sliding_window", "use_sliding_window"} | {"rope_theta"}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    ],
)
def test_rope_survives_the_way_through_transformers(tmp_path: Path, rope: dict[str, Any]) -> None:
    config = DRAFTER.model_copy(update={"rope": rope})
    path = write_drafter(tmp_path, config=config)
    layer = json.loads((path / "config.json").read_text())["transformer_layer_config"]
    assert LlamaConfig(**layer).rope_parameters == rope
    assert read_drafter_config(path).config.rope == rope
    del layer["rope_parameters"]
    older = write_config(
        tmp_path / "older", json.loads((path / "config.json").read_text()) | {"transformer_layer_config": layer}
    )
    assert read_drafter_config(older).config.rope == rope


def test_the_manifest_lists_every_file_and_tensor(tmp_path: Path) -> None:
    path = write_drafter(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["files"].keys() == FILES - {"manifest.json"}
    for name, entry in manifest["files"].items():
        content = (path / name).read_bytes()
        assert (entry["bytes"], entry["digest"]) == (len(content), f"blake3:{blake3(content).hexdigest()}")
    assert manifest["tensors"]["model.safetensors"].keys() == expected_tensors(DRAFTER).keys()
    header = read_header(path / "model.safetensors")
    first = (path / "model.safetensors").read_bytes()[: header.data_start]
    assert manifest["headers"] == {"model.safetensors": f"blake3:{blake3(first).hexdigest()}"}
    assert (manifest["schema_version"], manifest["epoch"], manifest["step"]) == (2, 0, 1)


def test_a_full_vocabulary_is_written_without_a_map(tmp_path: Path) -> None:
    config = DRAFTER.model_copy(update={"draft_vocab_size": V})
    tensors = drafter_tensors(config) | {"d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.ones(V).bool()}
    assert not {"d2t", "t2d"} & read_drafter_tensors(write_drafter(tmp_path, config=config, tensors=tensors)).keys()


def test_what_does_not_fit_the_config_is_not_written(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    fc = tensors.pop("fc.weight")
    with pytest.raises(CheckpointError, match=r"without fc\.weight"):
        write_drafter(tmp_path, tensors=tensors)
    with pytest.raises(CheckpointError, match="shape"):
        write_drafter(tmp_path, tensors={**tensors, "fc.weight": fc[:, 1:]})
    with pytest.raises(CheckpointError, match=r"verifier_norm\.weight"):
        write_drafter(tmp_path, tensors={**tensors, "fc.weight": fc, "verifier_norm.weight": torch.ones(H)})
    assert list(tmp_path.iterdir()) == []


def test_an_epoch_is_never_overwritten_and_wreckage_is_cleared(tmp_path: Path) -> None:
    wreck = tmp_path / ".checkpoint-0-99.tmp"
    wreck.mkdir()
    (wreck / "model.safetensors").write_bytes(b"half")
    path = write_drafter(tmp_path)
    assert not wreck.exists()
    before = (path / "manifest.json").read_bytes()
    with pytest.raises(CheckpointError, match="never overwritten"):
        write_drafter(tmp_path)
    assert (path / "manifest.json").read_bytes() == before


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes: the nearest thing to a full disk that needs no rights."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(("failing", "limit"), [("model.safetensors", 8_000), ("optimizer_state_dict.pt", 26_000)])
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, failing: str, limit: int) -> None:
    write_drafter(tmp_path, 0)
    with pytest.raises(OSError, match=failing) as caught, file_limit(limit):
        write_drafter(tmp_path, 1)
    assert caught.value.errno == errno.EFBIG
    assert [entry.name for entry in tmp_path.iterdir()] == ["0"]


def test_a_missing_parent_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_checkpoint(
            tmp_path / "absent",
            "0",
            epoch=0,
            config=DRAFTER,
            tensors=drafter_tensors(),
            optimizer_state={},
            scheduler_state={},
            verifier_name="",
            verifier_architectures=[],
            speculative_tokens=3,
            step=0,
            extra={},
        )


# ---------------------------------------------------------------- configs of others


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}, (2, 30, 58)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 29, 57]}, (1, 29, 57)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]}}, (2, 30, 58)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}}, (2, 30, 58)),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [2, 30, 58],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]},
            },
            (2, 30, 58),
        ),
        ({}, None),
    ],
)
def test_layer_ids_mean_the_state_entering_a_layer(
    tmp_path: Path, changes: dict[str, Any], ids: tuple[int, ...] | None
) -> None:
    source = read_drafter_config(hf_style(tmp_path, **changes))
    assert source.config.aux_layer_ids == ids
    assert source.config.num_aux_states == 3
    if "eagle_aux_hidden_state_layer_ids" not in changes and ids == (2, 30, 58):
        shifted = changes["eagle_config"]["eagle_aux_hidden_state_layer_ids"][0] == 1
        assert any("outputs of layers" in note for note in source.notes) == shifted


def test_flags_at_the_top_and_nested(tmp_path: Path) -> None:
    config = read_drafter_config(
        hf_style(tmp_path, norm_before_residual=True, eagle_config={"norm_before_fc": True})
    ).config
    assert (config.norm_before_residual, config.norm_before_fc, config.fc_norm) == (True, True, False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": 64.0}, r"vocab_size is 64\.0"),
        ({"draft_vocab_size": 65}, "draft_vocab_size 65 is larger than vocab_size 64"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0"),
        ({"draft_vocab_size": "24"}, "draft_vocab_size is '24'"),
        ({"eagle_aux_hidden_state_layer_ids": ["2"]}, "layer_ids"),
        ({"eagle_aux_hidden_state_layer_ids": [-1, 2, 3]}, "layer_ids"),
        ({"eagle_aux_hidden_state_layer_ids": 2}, "layer_ids"),
        ({"norm_before_residual": "yes"}, "norm_before_residual is 'yes'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"rope_scaling": {"type": "cosmic"}}, "cosmic"),
        ({"hidden_act": 7}, "hidden_act"),
        ({"target_hidden_size": 32}, "target_hidden_size 32"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, "differ between layers"),
        ({"use_sliding_window": True}, "sliding_window is missing"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None}, "not an EAGLE-3 drafter"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"], "kv_lora_rank": 8}, "without q_lora_rank"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_drafter_config(hf_style(tmp_path, **changes))


def test_a_speculators_config_without_the_residual_flag_says_so(tmp_path: Path) -> None:
    path = write_drafter(tmp_path)
    config = json.loads((path / "config.json").read_text())
    del config["norm_before_residual"]
    source = read_drafter_config(write_config(tmp_path / "copy", config))
    assert not source.config.norm_before_residual
    assert any("norm_before_residual is not stated" in note for note in source.notes)


@pytest.mark.parametrize(
    ("name", "form", "ids", "flag"),
    [
        ("speculators-0.9.0/0", "speculators", (2, 8, 13), True),
        ("speculators-0.3.0/0", "speculators", None, True),
        ("specforge-hf", "specforge", None, False),
        ("specforge-sglang", "specforge", None, False),
        ("modelopt", "modelopt", (2, 4, 5), False),
        ("eagle-official", "official-eagle", None, False),
    ],
)
def test_real_checkpoints_of_peers(name: str, form: str, ids: tuple[int, ...] | None, flag: bool) -> None:
    path = peer_checkpoint(name)
    source = read_drafter_config(path)
    assert (source.format, source.config.aux_layer_ids, source.config.norm_before_residual) == (form, ids, flag)
    expected = expected_tensors(source.config)
    tensors = read_drafter_tensors(path)
    assert tensors.keys() <= expected.keys()
    assert expected.keys() - tensors.keys() <= {"embed_tokens.weight", "t2d"}
    assert all(tuple(tensor.shape) == expected[tensor_name][0] for tensor_name, tensor in tensors.items())


# ---------------------------------------------------------------- tensors of others


def test_names_of_three_habits(tmp_path: Path) -> None:
    tensors = {name: t for name, t in drafter_tensors().items() if name.startswith("layers.0.")}
    for number, (old, new) in enumerate((("layers.0.", "midlayer."), ("", "model."), ("layers.0.", "model.midlayer."))):
        file = tmp_path / f"{number}.safetensors"
        save_file({new + name.removeprefix(old): tensor for name, tensor in tensors.items()}, file)
        assert read_drafter_tensors(file).keys() == tensors.keys()


def test_two_names_for_one_tensor_are_listed(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    save_file({"midlayer.hidden_norm.weight": torch.ones(2), "layers.0.hidden_norm.weight": torch.ones(2)}, file)
    with pytest.raises(CheckpointError, match=r"(midlayer.*layers|layers.*midlayer)"):
        read_drafter_tensors(file)


class Canary:
    """Makes a file when a careless reader unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, int]]:
        return os.mkdir, (str(self.path), 0o700)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_is_never_executed(tmp_path: Path, zipped: bool) -> None:
    canary = Canary(tmp_path / "CANARY")
    file = tmp_path / "pytorch_model.bin"
    if zipped:
        torch.save({"a": canary}, file)
    else:
        file.write_bytes(pickle.dumps({"a": canary}))
    with pytest.raises(UnreadableFile, match="not opened"):
        read_drafter_tensors(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(canary))
    with pytest.raises(UnreadableFile, match="not opened"):
        read_drafter_tensors(tmp_path)
    assert not canary.path.exists()


def test_pickled_weights_are_read(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert read_drafter_tensors(tmp_path).keys() == tensors.keys()
    torch.save({"state_dict": tensors, "step": 3}, tmp_path / "pytorch_model.bin")
    assert read_drafter_tensors(tmp_path).keys() == tensors.keys()
    torch.save([1, 2], tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="not tensors by name"):
        read_drafter_tensors(tmp_path)


def test_no_weights_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no weights"):
        read_drafter_tensors(tmp_path)
    with pytest.raises(CheckpointError, match="no such"):
        read_drafter_tensors(tmp_path / "absent")


def test_a_custom_code_file_is_not_executed(tmp_path: Path) -> None:
    path = write_drafter(tmp_path)
    (path / "config.py").write_text("raise SystemExit('executed')")
    assert describe_drafter(path).config == DRAFTER
    assert read_drafter_tensors(path)


def test_published_names_and_flags(tmp_path: Path) -> None:
    naming = make_case("H04", tmp_path)
    for habit in ("midlayer", "model_prefix"):
        assert "layers.0.self_attn.q_proj.weight" in read_drafter_tensors(naming / habit)
    with pytest.raises(CheckpointError, match="two names"):
        read_drafter_tensors(naming / "both")


def test_optimizer_state_is_kept_in_its_own_precision(tmp_path: Path) -> None:
    state = optimizer_state(drafter_tensors(), steps=2)
    path = write_drafter(tmp_path, optimizer=state, steps=2)
    loaded = torch.load(path / "optimizer_state_dict.pt", weights_only=True)
    assert torch.equal(loaded["state"][0]["exp_avg_sq"], state["state"][0]["exp_avg_sq"])


def test_a_directory_of_checkpoints_and_a_file_of_weights_are_told_from_a_checkpoint(tmp_path: Path) -> None:
    for epoch in (0, 9, 10):
        write_drafter(tmp_path, epoch)
    with pytest.raises(CheckpointError, match=f"{tmp_path} is a directory of checkpoints; .* such as {tmp_path}/10"):
        read_drafter_config(tmp_path)
    with pytest.raises(CheckpointError, match=r"model.safetensors is a file of weights; give the directory"):
        read_drafter_config(tmp_path / "0" / "model.safetensors")
