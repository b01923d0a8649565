"""Drafters with latent attention, as DeepSeek's and Kimi's: computed, trained, written and read as servers do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from eagle3_core.checkpoint.format import read_drafter_config, read_drafter_tensors
from eagle3_core.checkpoint.judge import judge
from eagle3_core.contract.drafter_config import MLA, expected_tensors
from eagle3_core.errors import BadInput, CheckpointError
from eagle3_core.model.drafter import DrafterKeys, Eagle3Drafter, LayerKeys
from tests import tiny
from tests.unit.core.test_resume import StopAtLook, events_of, run, weights
from tests.unit.core.test_stages import Bench
from tests.unit.core.test_ttt import small_drafter
from worker.context import Stopped

SIZES = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 4}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


KIMI = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": tiny.HIDDEN,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "vocab_size": tiny.VOCAB,
    "draft_vocab_size": 64,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_theta": 7000.0,
    "num_aux_hidden_states": 3,
    "bos_token_id": 256,
    "eos_token_id": [258],
    **SIZES,
}


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Any]:
    """A verifier that has latent attention itself, states of it, and a vocabulary map."""
    verifier = tiny.make_verifier(tmp_path / "verifier", rope_parameters=YARN, **SIZES)
    store = tiny.make_store(tmp_path / "store", verifier)
    return {
        "verifier": str(verifier),
        "data_dir": str(store),
        "vocab_map_dir": str(tiny.make_vocab_map(tmp_path / "prepared", store)),
        "epochs": 1,
        "max_seq_len": 64,
        "batch_tokens": 48,
        "lr": 1e-3,
        "val_ratio": 0.25,
    }


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 10000.0}, YARN], ids=["plain", "yarn"])
def test_attention_is_that_of_transformers(rope: dict[str, Any]) -> None:
    # The latents' norms have an eps of their own there, 1e-6.
    drafter = small_drafter(mla=MLA(**SIZES), num_hidden_layers=2, rope=rope, rms_norm_eps=1e-6, hidden_size=32)
    ours = drafter.layers[1].self_attn
    theirs_config = DeepseekV3Config(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=2560,
        rope_parameters=dict(rope), attn_implementation="eager", **SIZES,
    )  # fmt: skip
    theirs = DeepseekV3Attention(theirs_config, 0)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(50, 32)
    cos_sin = DeepseekV3RotaryEmbedding(theirs_config)(x[None], torch.arange(50)[None])
    mask = torch.full((50, 50), float("-inf")).triu(1)[None, None]
    expected = theirs(x[None], cos_sin, mask)[0][0]
    rows = torch.arange(50)
    got = ours(x, rows, 0, drafter.rotation(rows, torch.float32), LayerKeys())
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_it_is_trained_stopped_resumed_judged_and_finetuned(tmp_path: Path, inputs: dict[str, Any]) -> None:
    asked = inputs | {"mla": True, "fc_norm": True, "norm_output": True}
    run(asked, tmp_path / "whole")
    with pytest.raises(Stopped):
        run(asked, tmp_path / "parts", StopAtLook(1))
    run(asked, tmp_path / "parts")
    one, other = weights(tmp_path / "whole", "0"), weights(tmp_path / "parts", "0")
    assert one["layers.0.self_attn.kv_a_proj_with_mqa.weight"].shape == (18, 64)
    for name in one:
        torch.testing.assert_close(one[name].float(), other[name].float(), rtol=0.1, atol=2e-3)
    for name in ("whole", "parts"):
        assert {each["verdict"] for each in events_of(tmp_path / name, 0, "verdict")} == {"valid"}
    fresh = {key: value for key, value in inputs.items() if key != "vocab_map_dir"}
    run(fresh | {"finetune_from": str(tmp_path / "whole" / "0"), "dtype": "bfloat16"}, tmp_path / "tuned")
    config = read_drafter_config(tmp_path / "tuned" / "0").config
    assert config == read_drafter_config(tmp_path / "whole" / "0").config
    assert (config.mla, config.rope["mscale_all_dim"], config.fc_norm) == (MLA(**SIZES), 1.0, True)
    with pytest.raises(BadInput, match=r"mla False was asked for.*leave mla out"):
        run(fresh | {"mla": False, "finetune_from": str(tmp_path / "whole" / "0")}, tmp_path / "refused")


def test_its_config_is_the_one_servers_load(tmp_path: Path, inputs: dict[str, Any]) -> None:
    run(inputs | {"mla": True}, tmp_path / "out")
    path = tmp_path / "out" / "0"
    said = json.loads((path / "config.json").read_text())
    assert (said["architectures"], said["model_type"]) == (["Eagle3DeepseekV2ForCausalLM"], "deepseek_v2")
    # vLLM reads states at the top; SGLang reads outputs of layers, one less, where the list begins with 1.
    assert said["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert said["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert (said["num_aux_hidden_states"], said["norm_before_fc"], "head_dim" in said) == (3, False, False)
    loaded = AutoConfig.from_pretrained(path)
    assert (loaded.q_lora_rank, loaded.v_head_dim, loaded.rope_parameters["factor"]) == (12, 4, 40.0)
    source = read_drafter_config(path)
    tensors = read_drafter_tensors(path)
    assert tensors.keys() == expected_tensors(source.config).keys()
    drafter = Eagle3Drafter(source.config)
    drafter.load_state_dict(tensors)
    rows = torch.arange(5)
    out = drafter.step(rows, drafter.fuse(torch.randn(5, 3, tiny.HIDDEN)), rows, 0, DrafterKeys(1))
    assert out.isfinite().all()
    assert judge(path, verifier=Path(inputs["verifier"])).verdict == "valid"


def test_a_fresh_drafter_is_llama_style_unless_asked_or_described_otherwise(
    tmp_path: Path, inputs: dict[str, Any]
) -> None:
    run(inputs, tmp_path / "usual")
    assert "layers.0.self_attn.q_proj.weight" in load_file(tmp_path / "usual" / "0" / "model.safetensors")
    described = tmp_path / "shape.json"
    described.write_text(json.dumps(KIMI))
    run(inputs | {"drafter_config": str(described)}, tmp_path / "described")
    made = read_drafter_config(tmp_path / "described" / "0").config
    assert (made.mla, made.num_attention_heads, made.rope["rope_theta"]) == (MLA(**SIZES), 2, 7000.0)
    run(inputs | {"drafter_config": str(described), "mla": False}, tmp_path / "not_so")
    assert read_drafter_config(tmp_path / "not_so" / "0").config.mla is None


def test_one_published_by_others_is_finetuned_and_evaluated(tmp_path: Path) -> None:
    """Names, config and tensors as Kimi drafters are published: midlayer.*, no embedding, no t2d, nested ids."""
    bench = Bench(tmp_path)
    store = tiny.make_store(tmp_path / "store", bench.verifier)
    vocab_map = tiny.make_vocab_map(tmp_path / "prepared", store)
    described = tmp_path / "shape.json"
    described.write_text(json.dumps(KIMI))
    data = {"verifier": bench.verifier, "data_dir": store, "epochs": 1, "max_seq_len": 64}
    bench.run("train", **data, vocab_map_dir=vocab_map, drafter_config=described)
    ours, theirs = bench.out / "0", tmp_path / "theirs"
    theirs.mkdir()
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}}
    (theirs / "config.json").write_text(json.dumps(KIMI | ids))
    tensors = {
        name.replace("layers.0.", "midlayer."): tensor
        for name, tensor in load_file(ours / "model.safetensors").items()
        if name not in ("t2d", "embed_tokens.weight")
    }
    save_file(tensors, theirs / "model.safetensors")
    wanted = {"verifier": bench.verifier, "prompts": bench.conversations, "max_prompts": 2, "max_new_tokens": 6}
    first, second = (bench.run("evaluate", checkpoint=path, **wanted).data for path in (ours, theirs))
    assert first == second
    assert first["prompts_identical"] == first["prompts_decoded"] == 2
    bench.run("train", **data, finetune_from=theirs, lr=1e-9)
    assert read_drafter_config(bench.out / "0").config == read_drafter_config(ours).config
    one, other = (load_file(path / "0" / "model.safetensors") for path in (ours.parent, bench.out))
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"norm_before_fc": True}, "norm_before_fc: a drafter with latent attention"),
        ({"head_dim": 8}, "head_dim: a drafter with latent attention"),
        ({"sliding_window": 8, "qk_norm": True}, "qk_norm, sliding_window: a drafter with latent attention"),
    ],
)
def test_what_it_does_not_have(tmp_path: Path, inputs: dict[str, Any], asked: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        run(inputs | {"mla": True} | asked, tmp_path / "out")


def test_sizes_nobody_states(tmp_path: Path) -> None:
    inputs = tiny.make_training_inputs(tmp_path)
    with pytest.raises(BadInput, match=r"mla was asked for; neither drafter_config nor .*verifier says in which sizes"):
        run(inputs | {"mla": True}, tmp_path / "out")
    config = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "hidden_size": 8, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 9, "kv_lora_rank": 4}))
    with pytest.raises(CheckpointError, match="kv_lora_rank without q_lora_rank"):
        read_drafter_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(KIMI | {"qk_rope_head_dim": 7}))
    with pytest.raises(CheckpointError, match="qk_rope_head_dim is 7: Input should be a multiple of 2"):
        read_drafter_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"speculators_config": {}, "transformer_layer_config": KIMI}))
    with pytest.raises(CheckpointError, match="latent attention in the speculators format, which servers refuse"):
        read_drafter_config(tmp_path)
