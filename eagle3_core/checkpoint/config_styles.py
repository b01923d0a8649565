"""config.json of a drafter, in the styles that servers read. Standard library only.

    speculators   sizes in transformer_layer_config, flags and states at the top
    flat          vLLM's HF style and SGLang's: all at the top; states at the top, SGLang's layer ids in eagle_config
    official      the module of SafeAILab/EAGLE: flat, in the layout of transformers 4

Flags are always explicit. KEPT_KEY keeps what the flat styles have no place for; servers pass over it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eagle3_core.contract.drafter_config import DrafterConfig
from eagle3_core.contract.drafter_files import KEPT_KEY

SPECULATORS_VERSION = "0.9.0"
TRANSFORMERS_VERSION = "5.19.0"


@dataclass(frozen=True)
class Serving:
    """What a drafter is served beside: path or hub id and classes of the verifier, draft tokens a round."""

    verifier: str
    architectures: tuple[str, ...] = ()
    speculative_tokens: int = 3


@dataclass(frozen=True)
class Parts:
    """What DrafterConfig does not say: width of the aux states, biases of fc and MLP, dtype of the weights."""

    target_hidden_size: int | None = None
    fc_bias: bool = False
    mlp_bias: bool = False
    dtype: str = "bfloat16"


_PLAIN = Parts()


def speculators_config(
    config: DrafterConfig,
    verifier_name: str,
    verifier_architectures: Sequence[str],
    speculative_tokens: int,
    parts: Parts = _PLAIN,
) -> dict[str, Any]:
    """config.json as speculators 0.9.0 writes it; every flag explicit, no custom code."""
    layer = _layer_config(config) | {
        "attention_bias": config.attention_bias,
        "head_dim": config.head_dim,
        "mlp_bias": parts.mlp_bias,
        "model_type": "qwen3" if config.qk_norm else "llama",
        "pad_token_id": None,
        "pretraining_tp": 1,
    }
    ids = config.aux_layer_ids
    return _flags(config) | {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": config.draft_vocab_size,
        "dtype": parts.dtype,
        "eagle_aux_hidden_state_layer_ids": None if ids is None else list(ids),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": speculative_tokens,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": list(verifier_architectures), "name_or_path": verifier_name},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "target_hidden_size": parts.target_hidden_size,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "transformers_version": TRANSFORMERS_VERSION,
    }


def flat_config(
    config: DrafterConfig,
    *,
    nested_ids: Sequence[int] | None = None,
    parts: Parts = _PLAIN,
    serving: Serving | None = None,
) -> dict[str, Any]:
    """config.json for vLLM 0.33 and SGLang 0.5.23.

    model_type deepseek_v2 is the one that vLLM neither rewrites nor fails to take for latent attention.

    Args:
        config: what the drafter computes; its states stand at the top, where vLLM looks.
        nested_ids: layer ids as SGLang reads them; None: none are written.
        parts: what the config does not say.
        serving: what the style has no place for; kept under a key of our own.
    """
    said = _layer_config(config) | _flags(config) | _kept(serving)
    if config.mla is not None:
        said |= {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
        said |= config.mla.model_dump()
    elif config.qk_norm:
        said |= {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": config.head_dim}
    else:
        said |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "head_dim": config.head_dim}
    if config.aux_layer_ids is not None:
        said["eagle_aux_hidden_state_layer_ids"] = list(config.aux_layer_ids)
    eagle: dict[str, Any] = {"use_aux_hidden_state": True}
    if nested_ids is not None:
        eagle["eagle_aux_hidden_state_layer_ids"] = list(nested_ids)
    if parts.target_hidden_size is not None:
        said["target_hidden_size"] = parts.target_hidden_size  # null is no number to servers: left out instead
    if parts.fc_bias:
        said["bias"] = True
    return said | {
        "attention_bias": config.attention_bias,
        "draft_vocab_size": config.draft_vocab_size,
        "dtype": parts.dtype,
        "eagle_config": eagle,
        "mlp_bias": parts.mlp_bias,
        "num_aux_hidden_states": config.num_aux_states,
        "transformers_version": TRANSFORMERS_VERSION,
    }


def official_config(config: DrafterConfig, parts: Parts, serving: Serving | None) -> dict[str, Any]:
    """config.json for the module of SafeAILab/EAGLE, which takes what it does not know for nothing.

    Source: eagle/model/cnets.py and configs.py at cb7e084.
    """
    said = _layer_config(config) | _flags(config) | _kept(serving)
    rope = said.pop("rope_parameters")
    plain = rope["rope_type"] == "default"
    said["rope_scaling"] = None if plain else {"type": rope["rope_type"], "factor": rope["factor"]}
    if config.aux_layer_ids is not None:
        said["eagle_aux_hidden_state_layer_ids"] = list(config.aux_layer_ids)
    if parts.target_hidden_size is not None:
        said["target_hidden_size"] = parts.target_hidden_size
    return said | {
        "architectures": ["LlamaForCausalLM"],
        "draft_vocab_size": config.draft_vocab_size,
        "head_dim": config.head_dim,
        "model_type": "llama",
        "pad_token_id": None,
        "torch_dtype": parts.dtype,
    }


def generation_config(config: DrafterConfig) -> dict[str, Any]:
    """generation_config.json: the tokens that begin and end a text."""
    tokens = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    known = {key: value for key, value in tokens.items() if value is not None}
    return {"_from_model_config": True, **known, "transformers_version": TRANSFORMERS_VERSION}


def _flags(config: DrafterConfig) -> dict[str, Any]:
    return {
        "embed_requires_grad": config.own_embedding,
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.norm_before_fc,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
    }


def _kept(serving: Serving | None) -> dict[str, Any]:
    if serving is None:
        return {}
    kept = {"architectures": list(serving.architectures), "name_or_path": serving.verifier}
    return {KEPT_KEY: kept | {"speculative_tokens": serving.speculative_tokens}}


def _layer_config(config: DrafterConfig) -> dict[str, Any]:
    """Sizes, window and rope, as every kind of decoder names them."""
    rope = config.rope
    layer: dict[str, Any] = {
        "attention_dropout": 0.0,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "hidden_act": config.hidden_act,
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        # Readers of the transformers 4 layout would fall back to 10000 in silence.
        "rope_theta": rope["rope_theta"],
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }
    if rope["rope_type"] != "default":
        layer["rope_scaling"] = dict(rope)
    if config.sliding_window is not None:
        layer |= {
            "layer_types": ["sliding_attention"] * config.num_hidden_layers,
            "sliding_window": config.sliding_window,
            "use_sliding_window": True,
        }
    return layer
