"""What vLLM is served: tiny drafters of every make, right ones and with one fault each; what it does with them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from eagle3_core.checkpoint.findings import Outcome
from eagle3_core.contract.params import ServedFormat
from tests.judging import drop, put

Config = dict[str, Any]
Edit = Callable[[Config], object]
Change = Callable[[dict[str, Tensor]], object]
Runner = Literal["v1", "v2"]

HIDDEN, AUX, VOCABULARY = 64, 3 * 64, 512
IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Case:
    """A drafter of some make in a format, its tensors and config changed.

    rule: what is said of it; None: nothing but how it must be started.
    does: what vLLM does.
    said: what the rules say it does, where a note is all that can be said.
    words: of the error it ends with.
    make: fields of DrafterConfig unlike the plain drafter's.
    tokens: draft tokens of a chain that are compared.
    """

    rule: str | None
    does: Outcome
    words: str = ""
    make: Config = field(default_factory=dict)
    target: ServedFormat = "vllm"
    change: Change = lambda tensors: None
    edit: Edit = lambda config: None
    said: Outcome | None = None
    runners: tuple[Runner, ...] = ("v1", "v2")
    tokens: int = 3


def keys(**values: Any) -> Edit:
    """Set keys of the config; ... takes one out."""

    def edit(config: Config) -> None:
        config.update(values)
        for key in [key for key, value in values.items() if value is ...]:
            del config[key]

    return edit


def inside(section: str, **values: Any) -> Edit:
    """The same in a section of it."""
    return lambda config: keys(**values)(config.setdefault(section, {}))


def every(*edits: Edit) -> Edit:
    return lambda config: [edit(config) for edit in edits]


def layer(**values: Any) -> Edit:
    return inside("transformer_layer_config", **values)


def moved(**values: Any) -> Edit:
    """Keys that stand in eagle_config alone."""
    return every(keys(**dict.fromkeys(values, ...)), inside("eagle_config", **values))


def rename(old: str, new: str) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def absolute(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def other_order(tensors: dict[str, Tensor]) -> None:
    """The columns of fc for states 5, 4, 2, which it was trained on as 2, 4, 5."""
    tensors["fc.weight"] = torch.cat(tensors["fc.weight"].chunk(3, dim=1)[::-1], dim=1).contiguous()


def mlp_biases(tensors: dict[str, Tensor]) -> None:
    for name in ("gate_proj", "up_proj", "down_proj"):
        rows = tensors[f"layers.0.mlp.{name}.weight"].shape[0]
        tensors[f"layers.0.mlp.{name}.bias"] = torch.zeros(rows).bfloat16()


QWEN3 = {"qk_norm": True}
TWO = {"num_hidden_layers": 2}
FULL = {"draft_vocab_size": VOCABULARY}
WINDOW = {"sliding_window": 6}
LATER = {"aux_layer_ids": [3, 5, 6]}
LATENT = {
    "mla": {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32},
    "head_dim": 48,
    "num_key_value_heads": 2,
}
_WEIGHTS = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}}
_PACKED = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
_ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": _WEIGHTS | {"input_activations": _ACTIVATIONS}},
    "ignore": ["lm_head"],
}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _PACKED}},
    "ignore": ["lm_head"],
}


def rope(kind: str, **numbers: float) -> Config:
    return {"rope": {"rope_type": kind, "rope_theta": 10000.0, **numbers}}


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32)
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)

RIGHT: dict[str, Case] = {
    "plain": Case(None, "loads"),
    "plain, speculators": Case(None, "loads", target="speculators"),
    "two layers, every flag, norms of heads": Case(
        None, "loads", make=TWO | QWEN3 | {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
    ),
    "the same, speculators": Case(
        None,
        "loads",
        make=TWO | QWEN3 | {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
        target="speculators",
    ),
    "fc_norm": Case(None, "loads", make={"fc_norm": True}),
    "fc_norm, speculators": Case(None, "loads", make={"fc_norm": True}, target="speculators"),
    "biases of attention": Case(None, "loads", make={"attention_bias": True}),
    "biases of the MLP": Case(None, "loads", change=mlp_biases, edit=keys(mlp_bias=True)),
    "full vocabulary": Case(None, "loads", make=FULL),
    "four states": Case(None, "loads", make={"aux_layer_ids": [1, 2, 4, 5], "num_aux_states": 4}),
    "first and last state": Case(None, "loads", make={"aux_layer_ids": [0, 4, 8]}),
    "its own embedding": Case(None, "loads", make={"own_embedding": True}),
    "no embedding": Case(None, "loads", change=drop("embed_tokens.weight")),
    "wide heads": Case(None, "loads", make={"head_dim": 64}),
    "yarn": Case(None, "loads", make=YARN),
    "llama3": Case(None, "loads", make=LLAMA3),
    "linear": Case(None, "loads", make=rope("linear", factor=4.0)),
    "dynamic": Case(None, "loads", make=rope("dynamic", factor=4.0)),
    "the base of rope at the top alone": Case(
        None, "loads", make={"rope": {"rope_type": "default", "rope_theta": 500.0}}, edit=keys(rope_parameters=...)
    ),
    "midlayer": Case(None, "loads", change=rename("layers.0.", "midlayer.")),
    "ids at both places": Case(None, "loads", edit=inside("eagle_config", **{IDS: [1, 3, 4]})),
    "norm_before_fc in eagle_config": Case(
        None, "loads", make={"norm_before_fc": True}, edit=moved(norm_before_fc=True)
    ),
    "a null width, speculators": Case(None, "loads", target="speculators", edit=keys(target_hidden_size=None)),
    "tied, full vocabulary": Case(None, "loads", make=FULL, edit=keys(tie_word_embeddings=True)),
}

FAULTS: dict[str, Case] = {
    # tensors
    "fc missing": Case("missing_tensor", "loads_wrongly", change=drop("fc.weight")),
    "biases missing": Case(
        "missing_tensor",
        "loads_wrongly",
        make={"attention_bias": True},
        change=drop(*(f"layers.0.self_attn.{name}_proj.bias" for name in "qkvo")),
    ),
    "d2t absent": Case("map_missing", "loads_wrongly", change=drop("d2t", "t2d")),
    "d2t absolute": Case("wrong_map", "loads_wrongly", change=absolute),
    "head missing": Case("head_missing", "loads_wrongly", change=drop("lm_head.weight")),
    "unknown name": Case(
        "unknown_tensor", "refuses", "no module", change=put("verifier_norm.weight", torch.ones(HIDDEN))
    ),
    "prefix": Case("unknown_tensor", "refuses", "no module", change=rename("layers.", "model.layers.")),
    "d2t of a full vocabulary": Case(
        "unknown_tensor", "refuses", "draft_id_to_target_id", make=FULL, change=put("d2t", torch.zeros(512).long())
    ),
    "norm before fc without its flag": Case(
        "input_norm_dropped", "loads_wrongly", make={"norm_before_fc": True}, edit=keys(norm_before_fc=False)
    ),
    "biases without their flag": Case(
        "bias_dropped", "loads_wrongly", make={"attention_bias": True}, edit=keys(attention_bias=False)
    ),
    "a bias of o_proj, qwen3": Case(
        "bias_dropped", "loads_wrongly", make=QWEN3 | {"attention_bias": True}, target="speculators"
    ),
    "further layers under SGLang's names": Case(
        "further_layers",
        "loads_wrongly",
        make=TWO,
        change=rename("layers.1.input_layernorm", "layers.1.hidden_norm"),
    ),
    # which class, which format
    "architectures empty": Case("architecture", "refuses", "architectures", edit=keys(architectures=[])),
    "architectures absent": Case("architecture", "refuses", "architectures", edit=keys(architectures=...)),
    "architecture unknown": Case(
        "architecture", "refuses", "Eagle3FalconForCausalLM", edit=keys(architectures=["FalconForCausalLM"])
    ),
    "qwen3 under llama's class": Case(
        "other_layers", "refuses", "k_norm", make=QWEN3, edit=keys(architectures=["LlamaForCausalLMEagle3"])
    ),
    "latents under llama's class": Case(
        "other_layers", "refuses", "kv_a_layernorm", make=LATENT, edit=keys(architectures=["LlamaForCausalLMEagle3"])
    ),
    "llama under qwen3's class": Case(
        "missing_tensor", "loads_wrongly", edit=keys(architectures=["Eagle3Qwen3ForCausalLM"])
    ),
    "no model_type": Case("model_type", "refuses", "model_type", edit=keys(model_type=...)),
    "deepseek_v3": Case("mla_type", "refuses", "DeepSeekMTPModel", make=LATENT, edit=keys(model_type="deepseek_v3")),
    "norm before fc beside latents": Case(
        "mla_norm",
        "refuses",
        "input_norm",
        make=LATENT,
        change=put("input_norm.weight", torch.ones(AUX).bfloat16()),
        edit=keys(norm_before_fc=True),
    ),
    "model_type, speculators": Case(
        "native_type", "refuses", "Eagle3DraftModel", target="speculators", edit=keys(model_type="llama")
    ),
    "no speculators_model_type": Case(
        "native_key", "refuses", "Expected one of", target="speculators", edit=keys(speculators_model_type=...)
    ),
    "no speculators_config": Case(
        "native_key", "refuses", "model_type", target="speculators", edit=keys(speculators_config=...)
    ),
    "no proposal method": Case(
        "native_config", "loads", target="speculators", edit=inside("speculators_config", proposal_methods=...)
    ),
    "no verifier": Case(
        "native_config", "loads", target="speculators", edit=inside("speculators_config", verifier=...)
    ),
    "mistral, speculators": Case(
        "layer_type",
        "refuses",
        "Unsupported model_type mistral",
        target="speculators",
        edit=layer(model_type="mistral"),
    ),
    # sizes and parts
    "gelu": Case("activation", "refuses", "Only silu", edit=keys(hidden_act="gelu")),
    "gelu, speculators, qwen3": Case(
        "activation", "refuses", "Only silu", make=QWEN3, target="speculators", edit=layer(hidden_act="gelu")
    ),
    "gelu beside latents": Case("activation", "refuses", "Only silu", make=LATENT, edit=keys(hidden_act="gelu")),
    "null width": Case("null_width", "refuses", "NoneType", edit=keys(target_hidden_size=None)),
    "head_dim left to qwen3": Case("size_default", "refuses", "128", make=QWEN3, edit=keys(head_dim=...)),
    "key heads left to qwen3": Case(
        "size_default", "refuses", "num_kv_heads (32)", make=QWEN3, edit=keys(num_key_value_heads=...)
    ),
    "packed in four bits": Case("quantised", "refuses", "fc.weight", edit=keys(quantization_config=INT4)),
    "packed, speculators": Case(
        "quantised", "refuses", "fc.weight", target="speculators", edit=layer(quantization_config=INT4)
    ),
    "packed, speculators, at the top": Case(
        "quantised", "refuses", "fc.weight", target="speculators", edit=keys(quantization_config=INT4)
    ),
    "in eight bits": Case("quantised_silently", "loads_wrongly", edit=keys(quantization_config=INT8)),
    "another base of rope at the top": Case("rope_base_twice", "loads", edit=keys(rope_theta=500.0)),
    "another base of rope, speculators": Case(
        "rope_base_twice", "loads", target="speculators", edit=layer(rope_theta=500.0)
    ),
    "a window": Case("window", "loads", make=WINDOW, tokens=1),
    "a window, qwen3, speculators": Case("window", "loads", make=WINDOW | QWEN3, target="speculators", tokens=1),
    "a window without layer_types": Case("window_types", "loads_wrongly", make=WINDOW, edit=keys(layer_types=...)),
    "the same, qwen3": Case("window_types", "loads_wrongly", make=WINDOW | QWEN3, edit=keys(layer_types=...)),
    "no fc by eagle_config": Case(
        "aux_unused", "loads_wrongly", edit=inside("eagle_config", use_aux_hidden_state=False)
    ),
    "the same, of qwen3": Case(
        "aux_unused", "loads_wrongly", make=QWEN3, edit=inside("eagle_config", use_aux_hidden_state=False)
    ),
    # norm flags
    "norm_before_residual absent, speculators": Case(
        "flag_default", "loads_wrongly", target="speculators", edit=keys(norm_before_residual=...)
    ),
    "norm_before_residual in eagle_config": Case(
        "flag_place", "loads_wrongly", make={"norm_before_residual": True}, edit=moved(norm_before_residual=True)
    ),
    "norm_output in eagle_config": Case(
        "flag_place", "loads_wrongly", make={"norm_output": True}, edit=moved(norm_output=True)
    ),
    "fc_norm in eagle_config": Case(
        "unknown_tensor", "refuses", "fc_norm", make={"fc_norm": True}, edit=moved(fc_norm=True)
    ),
    "fc_norm under SGLang's name": Case(
        "unknown_tensor", "refuses", "fc_norm", make={"fc_norm": True}, edit=keys(fc_norm=..., use_aux_norm=True)
    ),
    "norm_before_fc in eagle_config, speculators": Case(
        "flag_place",
        "loads_wrongly",
        make={"norm_before_fc": True},
        target="speculators",
        edit=moved(norm_before_fc=True),
    ),
    # layer ids
    "in another order": Case("layer_order", "loads_wrongly", change=other_order, edit=keys(**{IDS: [5, 4, 2]})),
    "beyond the last layer": Case("layer_beyond", "loads_wrongly", "invalid for input", edit=keys(**{IDS: [2, 4, 9]})),
    "another number of states": Case("fc_width", "refuses", "64, 192", edit=keys(num_aux_hidden_states=4)),
    "four states, speculators": Case(
        "fc_width",
        "refuses",
        "64, 192",
        make={"aux_layer_ids": [1, 2, 4, 5], "num_aux_states": 4},
        target="speculators",
    ),
    "num_aux_layers": Case("fc_width", "refuses", "64, 256", make=QWEN3, edit=keys(num_aux_layers=4)),
    "in eagle_config alone": Case(
        "layer_states", "loads_wrongly", make=LATER, edit=moved(**{IDS: [3, 5, 6]}), runners=("v2",)
    ),
    "in eagle_config alone, V1": Case(None, "loads", make=LATER, edit=moved(**{IDS: [3, 5, 6]}), runners=("v1",)),
    "outputs of layers in eagle_config alone": Case(
        "layer_states", "loads_wrongly", edit=moved(**{IDS: [1, 3, 4]}), runners=("v1",)
    ),
    "in eagle_config alone, speculators": Case(
        "layer_states",
        "loads_wrongly",
        make=LATER,
        target="speculators",
        edit=moved(**{IDS: [3, 5, 6]}),
    ),
    "under layer_ids": Case(
        "layer_states_unknown",
        "loads_wrongly",
        make=LATER,
        edit=every(keys(**{IDS: ...}), inside("eagle_config", layer_ids=[3, 5, 6])),
        said="loads",
        runners=("v1",),
    ),
    "none": Case("layer_states_unknown", "loads_wrongly", make=LATER, edit=keys(**{IDS: ...}), said="loads"),
    "none, the default": Case("layer_states_unknown", "loads", edit=keys(**{IDS: ...})),
    "none, speculators 0.3": Case(
        "layer_states",
        "loads_wrongly",
        make=LATER,
        target="speculators",
        edit=keys(**{IDS: None, "speculators_version": "0.3.0"}),
    ),
}

CASES = RIGHT | FAULTS
