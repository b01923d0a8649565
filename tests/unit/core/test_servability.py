"""What servers would do with a drafter: each rule applies where it should, to the servers it should, and says why."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_core.checkpoint.findings import Servability
from eagle3_core.checkpoint.judge import judge
from eagle3_core.checkpoint.quick import judge_quick
from eagle3_core.checkpoint.server_rules import RULES, VERSIONS
from tests.cases import peer_checkpoint
from tests.judging import WEIGHTS, drop, foreign, put
from tests.makers import D, H, V, drafter_tensors, write_config, write_verifier

VLLM = ("vllm-v1", "vllm-v2")
LATENT = {
    "model_type": "deepseek_v2",
    "q_lora_rank": 6,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
}


def outcomes(path: Path, verifier: Path | None = None) -> dict[str, Servability]:
    return {one.server: one for one in judge(path, verifier=verifier).servers}


def rules(servability: Servability) -> set[str]:
    return {reason.rule for reason in servability.reasons if reason.effect != "note"}


def hf_style(tmp_path: Path, **config: Any) -> Path:
    """The drafter as vLLM and SGLang like it: flat, top-level states, outputs of layers in eagle_config."""
    path = tmp_path / "hf"
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": H,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "num_hidden_layers": 1,
        "vocab_size": V,
        "draft_vocab_size": D,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "num_aux_hidden_states": 3,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
    } | config
    write_config(path, {key: value for key, value in settings.items() if value is not ...})
    tensors = drafter_tensors()
    save_file(
        {name: tensor for name, tensor in tensors.items() if name not in ("embed_tokens.weight", "t2d")}, path / WEIGHTS
    )
    return path


def latent(tmp_path: Path, **config: Any) -> Path:
    """A drafter with latent attention, as Model-Optimizer and TorchSpec publish them."""
    sizes = LATENT | config
    path = hf_style(tmp_path, architectures=["Eagle3DeepseekV2ForCausalLM"], **sizes)
    query, value = 4 * (4 + 2), 4 * 4
    shapes = {
        "q_a_proj": (6, 2 * H),
        "q_a_layernorm": (6,),
        "q_b_proj": (query, 6),
        "kv_a_proj_with_mqa": (4 + 2, 2 * H),
        "kv_a_layernorm": (4,),
        "kv_b_proj": (4 * (4 + 4), 4),
        "o_proj": (H, value),
    }
    tensors = {name: tensor for name, tensor in load_file(path / WEIGHTS).items() if ".self_attn." not in name}
    tensors |= {f"layers.0.self_attn.{part}.weight": torch.rand(shape).bfloat16() for part, shape in shapes.items()}
    save_file(tensors, path / WEIGHTS)
    return path


def test_one_directory_for_both_servers(tmp_path: Path) -> None:
    verifier = write_verifier(tmp_path / "verifier")
    found = outcomes(hf_style(tmp_path), verifier)
    assert {name: one.outcome for name, one in found.items()} == {
        "speculators": "refuses",
        "vllm-v1": "loads",
        "vllm-v2": "loads",
        "sglang": "loads",
    }
    assert rules(found["speculators"]) == {"foreign_format"}


def test_the_speculators_format(tmp_path: Path) -> None:
    found = outcomes(foreign(tmp_path))
    assert {name: one.outcome for name, one in found.items()} == {
        "speculators": "loads",
        "vllm-v1": "loads",
        "vllm-v2": "loads",
        "sglang": "refuses",
    }
    assert [reason.rule for reason in found["vllm-v1"].reasons] == ["local_verifier"]


@pytest.mark.parametrize(
    ("change", "config", "server", "outcome", "rule"),
    [
        (drop("fc.weight"), {}, "vllm-v1", "loads_wrongly", "missing_tensor"),
        (drop("fc.weight"), {}, "speculators", "loads_wrongly", "missing_tensor"),
        (drop("lm_head.weight"), {}, "vllm-v2", "loads_wrongly", "head_missing"),
        (drop("lm_head.weight"), {}, "speculators", "loads_wrongly", "head_replaced"),
        (drop("d2t"), {}, "vllm-v1", "loads_wrongly", "map_missing"),
        (put("d2t", torch.arange(20, 20 + D)), {}, "vllm-v1", "loads_wrongly", "wrong_map"),
        (put("verifier_norm.weight", torch.ones(H)), {}, "vllm-v1", "refuses", "unknown_tensor"),
        (put("input_norm.weight", torch.ones(3 * H)), {}, "speculators", "loads_wrongly", "part_dropped"),
        (drop(), {"norm_before_residual": ...}, "vllm-v1", "loads_wrongly", "flag_default"),
        (drop(), {"model_type": "llama"}, "vllm-v1", "refuses", "native_type"),
        (
            drop(),
            {"speculators_config": {"verifier": {"name_or_path": "a/b"}}},
            "speculators",
            "refuses",
            "native_config",
        ),
        (drop(), {"eagle_aux_hidden_state_layer_ids": [2, 3, 4, 5]}, "speculators", "refuses", "fc_width"),
        (drop(), {"eagle_aux_hidden_state_layer_ids": [5, 4, 2]}, "vllm-v1", "loads_wrongly", "layer_order"),
    ],
)
def test_faults_in_the_speculators_format(
    tmp_path: Path, change: Any, config: dict[str, Any], server: str, outcome: str, rule: str
) -> None:
    found = outcomes(foreign(tmp_path, change, **config))[server]
    assert found.outcome == outcome
    assert rule in rules(found)


def test_a_window_is_not_kept_by_sglang_and_moves_on_in_vllm(tmp_path: Path) -> None:
    window = {"layer_types": ["sliding_attention"], "sliding_window": 128, "use_sliding_window": True}
    found = outcomes(hf_style(tmp_path, **window), write_verifier(tmp_path / "verifier"))
    for server, words in (("sglang", "not kept"), ("vllm-v1", "moves on")):
        assert found[server].outcome == "loads"
        assert any(reason.rule == "window" and words in reason.message for reason in found[server].reasons)


def test_a_norm_that_its_flag_does_not_ask_for_is_dropped_by_vllm(tmp_path: Path) -> None:
    path = hf_style(tmp_path)
    save_file(load_file(path / WEIGHTS) | {"input_norm.weight": torch.ones(3 * H)}, path / WEIGHTS)
    found = outcomes(path)
    assert (found["vllm-v1"].outcome, rules(found["vllm-v1"])) == ("loads_wrongly", {"input_norm_dropped"})
    save_file(load_file(path / WEIGHTS) | {"fc_norm.0.weight": torch.ones(H)}, path / WEIGHTS)
    assert outcomes(path)["vllm-v1"].outcome == "refuses", "of other norms it knows nothing"


NESTED = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}


@pytest.mark.parametrize(
    ("config", "server", "outcome", "rule"),
    [
        # ids in eagle_config alone: V1 takes them, V2 takes its default [2, 4, 5], SGLang adds one for this family
        (NESTED | {"eagle_aux_hidden_state_layer_ids": ...}, "vllm-v1", "loads", None),
        (NESTED | {"eagle_aux_hidden_state_layer_ids": ...}, "sglang", "loads_wrongly", "layer_states"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 5, 6]}, "eagle_aux_hidden_state_layer_ids": ...},
            "vllm-v2",
            "loads_wrongly",
            "layer_states",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [3, 5, 6]}, "sglang", "loads_wrongly", "layer_states"),
        ({"eagle_config": ..., "num_aux_hidden_states": ...}, "vllm-v1", "loads", None),
        ({"eagle_config": ..., "num_aux_hidden_states": ...}, "sglang", "loads", None),
        ({"num_aux_hidden_states": 4}, "vllm-v1", "refuses", "fc_width"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 99]}, "vllm-v2", "loads_wrongly", "layer_beyond"),
        ({"eagle_config": {"fc_norm": True}}, "sglang", "loads_wrongly", "flag_place"),
        ({"num_aux_hidden_states": 4}, "sglang", "refuses", "fc_width"),
        ({"norm_before_residual": True}, "sglang", "loads_wrongly", "residual_norm"),
        ({"norm_before_residual": True}, "vllm-v1", "loads", None),
        ({"tie_word_embeddings": True}, "sglang", "loads_wrongly", "tied_head"),
        ({"target_hidden_size": None}, "vllm-v1", "refuses", "null_width"),
        ({"target_hidden_size": None}, "sglang", "refuses", "null_width"),
        ({"attention_bias": True}, "sglang", "loads_wrongly", "bias_dropped"),
        ({"mlp_bias": True}, "sglang", "loads_wrongly", "mlp_bias"),
        ({"num_hidden_layers": 2}, "vllm-v1", "loads_wrongly", "further_layers"),
        ({"architectures": ["Eagle3Qwen3ForCausalLM"]}, "sglang", "refuses", "architecture"),
        ({"architectures": ["LlamaForCausalLM"]}, "vllm-v1", "loads", None),
        ({"architectures": ["Eagle3FalconForCausalLM"]}, "vllm-v1", "refuses", "architecture"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "vllm-v2", "loads_wrongly", "aux_unused"),
        ({"hidden_act": "gelu"}, "sglang", "refuses", "activation"),
        ({"model_type": ...}, "vllm-v1", "refuses", "model_type"),
        ({"architectures": []}, "vllm-v2", "refuses", "architecture"),
        ({"quantization_config": {"quant_method": "awq"}}, "vllm-v1", "refuses", "quantised"),
        ({"quantization_config": {"quant_method": "fp8"}}, "vllm-v1", "loads_wrongly", "quantised_silently"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "sglang",
            "loads_wrongly",
            "rope_base_twice",
        ),
    ],
)
def test_faults_in_hf_style(
    tmp_path: Path, config: dict[str, Any], server: str, outcome: str, rule: str | None
) -> None:
    found = outcomes(hf_style(tmp_path, **config), write_verifier(tmp_path / "verifier"))[server]
    assert (found.outcome, rule is None or rule in rules(found)) == (outcome, True)


@pytest.mark.parametrize(
    ("config", "server", "outcome", "rule"),
    [
        ({}, "vllm-v1", "loads", None),
        ({}, "sglang", "loads", None),
        ({"model_type": "deepseek_v3"}, "vllm-v1", "refuses", "mla_type"),
        ({"model_type": "deepseek_v3"}, "sglang", "loads", None),
        ({"model_type": "kimi_k2"}, "vllm-v1", "loads", None),
        ({"num_hidden_layers": 2}, "sglang", "refuses", "mla_layers"),
    ],
)
def test_drafters_with_latent_attention(
    tmp_path: Path, config: dict[str, Any], server: str, outcome: str, rule: str | None
) -> None:
    path = latent(tmp_path, **config)
    found = outcomes(path, write_verifier(tmp_path / "verifier"))[server]
    assert (found.outcome, rule is None or rule in rules(found)) == (outcome, True)


def test_latent_attention_is_judged_by_its_own_names_and_shapes(tmp_path: Path) -> None:
    path = latent(tmp_path)
    assert judge(path).verdict == "valid"
    tensors = load_file(path / WEIGHTS)
    kept = dict(tensors)
    del tensors["layers.0.self_attn.kv_b_proj.weight"]
    tensors["layers.0.self_attn.q_a_proj.weight"] = torch.ones(6, H).bfloat16()
    save_file(tensors, path / WEIGHTS)
    found = {finding.tensor: finding for finding in judge(path).findings if finding.severity == "error"}
    assert found["layers.0.self_attn.kv_b_proj.weight"].code == "missing_tensor"
    assert "q_lora_rank 6" in found["layers.0.self_attn.q_a_proj.weight"].message
    config = json.loads((path / "config.json").read_text())
    del config["v_head_dim"]
    (path / "config.json").write_text(json.dumps(config))
    save_file(kept, path / WEIGHTS)
    assert "v_head_dim is missing" in judge(path).errors()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("speculators-0.9.0/0", ("loads", "loads", "loads", "refuses")),
        ("speculators-0.3.0/0", ("loads_wrongly", "loads_wrongly", "loads_wrongly", "refuses")),
        ("specforge-sglang", ("refuses", "loads", "loads", "loads")),
        ("specforge-hf", ("refuses", "loads", "loads", "loads")),
        # Its ids are outputs of layers, in eagle_config alone: vLLM's V1 runner takes them for states.
        ("modelopt", ("refuses", "loads_wrongly", "loads", "loads")),
        ("eagle-official", ("refuses", "loads", "loads", "refuses")),
    ],
)
def test_real_checkpoints_of_peers(name: str, expected: tuple[str, ...]) -> None:
    assert tuple(one.outcome for one in judge_quick(peer_checkpoint(name)).servers) == expected


def test_speculators_0_3_is_served_one_layer_early(tmp_path: Path) -> None:
    path = foreign(tmp_path, eagle_aux_hidden_state_layer_ids=None, speculators_version="0.3.0")
    found = outcomes(path, write_verifier(tmp_path / "verifier"))["vllm-v1"]
    told = [reason.message for reason in found.reasons if reason.rule == "layer_states"]
    assert told == ["it feeds states [2, 4, 5], the drafter was trained on [3, 5, 6]"]


@pytest.mark.parametrize(
    ("config", "code", "words"),
    [
        ({"architectures": ["Eagle3FalconForCausalLM"]}, "not_served", "sglang: architecture Eagle3FalconForCausalLM"),
        ({"model_type": ...}, "not_served", "vllm-v1, vllm-v2, sglang: model_type is not stated"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised_config", "quantization_config"),
    ],
)
def test_what_no_server_serves_is_not_called_valid(
    tmp_path: Path, config: dict[str, Any], code: str, words: str
) -> None:
    path = hf_style(tmp_path, **config)
    for verdict in (judge_quick(path), judge(path)):
        told = {finding.code: finding.message for finding in verdict.findings}
        assert (verdict.verdict, words in told[code]) == ("suspect", True)


@pytest.mark.parametrize(
    ("top", "nested", "word"),
    [([2, 4, 5], [1, 3, 4], "valid"), ([3, 5, 6], [3, 5, 6], "valid"), ([3, 4, 5], [1, 3, 4], "invalid")],
)
def test_layer_ids_at_both_places_that_no_family_of_verifiers_makes_the_same(
    tmp_path: Path, top: list[int], nested: list[int], word: str
) -> None:
    config = {"eagle_aux_hidden_state_layer_ids": top, "eagle_config": {"eagle_aux_hidden_state_layer_ids": nested}}
    verdict = judge(hf_style(tmp_path, **config))
    assert (verdict.verdict, f"{top} at the top and {nested}" in verdict.errors()) == (word, word == "invalid")


def test_a_changed_embedding_is_replaced_by_sglang_alone(tmp_path: Path) -> None:
    path = hf_style(tmp_path)
    tensors = load_file(path / WEIGHTS) | {"embed_tokens.weight": torch.rand(V, H).bfloat16()}
    save_file(tensors, path / WEIGHTS)
    found = outcomes(path, write_verifier(tmp_path / "verifier"))
    assert rules(found["sglang"]) == {"embedding_replaced"}
    assert found["vllm-v1"].outcome == "loads"


def test_rules_are_told_apart_and_say_where_they_come_from() -> None:
    pairs = [(rule.code, server) for rule in RULES for server in rule.servers]
    assert len(pairs) == len(set(pairs))
    assert {server for _, server in pairs} == set(VERSIONS)
    assert all(rule.source and rule.fix for rule in RULES)
    assert all(set(rule.provoked) <= set(rule.servers) - {"sglang"} for rule in RULES)
