"""examples/kimi-k2.5-train.json on a scaled-down copy of that verifier's layout and of that drafter."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from client.http import ApiError
from tests import makers, tiny

EXAMPLE = Path(__file__).parents[2] / "examples" / "kimi-k2.5-train.json"


def write_15_tensor_drafter(directory: Path, aux_layer_ids: list[int]) -> Path:
    """Names, config and tensors as SpecForge exports them and AQ-MedAI publishes them: no embedding, midlayer.*."""
    directory.mkdir()
    tensors = makers.drafter_tensors()
    del tensors["embed_tokens.weight"]
    renamed = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    assert len(renamed) == 15
    save_file(renamed, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": makers.H,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "head_dim": 4,
        "hidden_act": "silu",
        "vocab_size": makers.V,
        "draft_vocab_size": makers.D,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": aux_layer_ids, "use_aux_hidden_state": True},
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def scaled_down(root: Path, aux_layer_ids: list[int]) -> dict[str, Any]:
    """The example with its paths and vocabulary size replaced, and nothing else."""
    request = json.loads(EXAMPLE.read_text())
    verifier = makers.write_kimi_like(root / "kimi-k2.5-int4")
    (verifier / "tiktoken.model").write_bytes(b"ranks")
    store = tiny.make_store(root / "hidden_states", verifier, rows=10)
    places = {
        "verifier": verifier,
        "data_dir": store,
        "vocab_map_dir": tiny.make_vocab_map(root / "prepared", store, makers.D, always=()),
        "output_dir": root / "checkpoints",
        "finetune_from": write_15_tensor_drafter(root / "drafter", aux_layer_ids),
    }
    assert {name for name, value in request["params"].items() if isinstance(value, str)} - {"scheduler"} == set(places)
    request["params"] |= {name: str(path) for name, path in places.items()} | {"draft_vocab_size": makers.D}
    return request


def test_the_users_own_run_as_one_request(new_daemon, tmp_path: Path) -> None:
    daemon = new_daemon(OMP_NUM_THREADS="1")
    [stored] = daemon.client.submit(scaled_down(daemon.root, [2, 4, 5]))
    job = daemon.wait_ended(stored["id"], limit_s=150)
    assert job["state"] == "succeeded", job
    checkpoints = daemon.client.checkpoints(stored["id"])
    assert [checkpoint["verdict"] for checkpoint in checkpoints] == ["valid"] * 5, checkpoints
    setup = {entry["title"]: entry["text"] for entry in job["setup"]}
    assert setup["finetune_from"].startswith("loaded 13 tensors, skipped 2 (t2d, d2t)")
    assert setup["samples"] == "9 train, 1 validation"
    assert setup["steps"] == "5 in 5 epochs, 1 of them warm-up"  # nine short rows fit into one pack
    log = daemon.client.log(stored["id"]).data.decode()
    for read in ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight"):
        assert f"read: {read} model-0000" in log
    config = json.loads((daemon.root / "checkpoints/4/config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["norm_before_residual"] is False
    assert config["transformer_layer_config"]["rope_parameters"] == {"rope_theta": 1000000.0, "rope_type": "default"}
    weights = load_file(daemon.root / "checkpoints/4/model.safetensors")
    assert len(weights) == 16
    assert torch.equal(weights["embed_tokens.weight"], makers.random(makers.V, makers.H))


def test_a_drafter_made_for_other_states_is_refused_by_name(new_daemon, tmp_path: Path) -> None:
    daemon = new_daemon(OMP_NUM_THREADS="1")
    request = scaled_down(daemon.root, [2, 3, 5])
    with pytest.raises(ApiError) as refused:
        daemon.client.submit(request)
    [fault] = refused.value.fields
    assert (refused.value.status, fault["pointer"]) == (422, "/params/finetune_from")
    assert "[2, 4, 5]" in fault["message"]
    assert "[2, 3, 5]" in fault["message"]
    request["params"] |= {"allow_source_mismatch": True, "epochs": 1, "output_dir": str(daemon.root / "other")}
    [look] = daemon.client.dry_run(request)["jobs"]
    assert "source_mismatch_allowed" in [warning["code"] for warning in look["preflight"]["warnings"]]
    [stored] = daemon.client.submit(request)
    job = daemon.wait_ended(stored["id"], limit_s=60)
    assert job["state"] == "succeeded", job
    assert [warning["code"] for warning in job["warnings"]].count("source_mismatch_allowed") == 1
    manifest = json.loads((daemon.root / "other/0/manifest.json").read_text())
    assert "[2, 3, 5]" in json.dumps(manifest)


def test_a_draft_vocabulary_larger_than_the_verifiers_never_starts(new_daemon, tmp_path: Path) -> None:
    daemon = new_daemon()
    request = scaled_down(daemon.root, [2, 4, 5])
    request["params"]["draft_vocab_size"] = 32000
    with pytest.raises(ApiError) as refused:
        daemon.client.submit(request)
    assert refused.value.status == 422
    assert refused.value.fields[0]["pointer"] == "/params/draft_vocab_size"
