"""What is odd among the keys of a drafter's config.json: misspelt ones, and values only some programs know. Standard
library only.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Keys that change what a drafter computes and that DrafterConfig has no field for, and the values that change nothing.
_PECULIAR: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "logit_scale": (1, 1.0),
    "partial_rotary_factor": (1, 1.0),
    "pard_token": (),
    "parallel_draft_step": (0, 1),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
}

_PARALLEL = ("pard_token", "parallel_draft_step")

# Keys that decide what a drafter computes; without them a default is taken.
_DECISIVE = (
    *("architectures", "model_type", "draft_vocab_size", "hidden_act", "head_dim", "rms_norm_eps"),
    *("num_hidden_layers", "num_key_value_heads", "num_aux_hidden_states", "max_position_embeddings"),
    *("eagle_aux_hidden_state_layer_ids", "eagle_config", "use_aux_hidden_state", "target_hidden_size"),
    *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "use_aux_norm", "embed_requires_grad"),
    *("attention_bias", "mlp_bias", "fc_bias", "tie_word_embeddings", "quantization_config", "logit_scale"),
    *("sliding_window", "use_sliding_window", "layer_types", "rope_theta", "rope_parameters", "rope_scaling"),
    *("rope_type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale_all_dim", "speculators_model_type"),
)

_NEVER_NULL = ("rms_norm_eps", "max_position_embeddings", "num_hidden_layers", "hidden_act", "use_aux_hidden_state")

_UNMISTAKABLE = frozenset(
    (
        *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "use_aux_hidden_state", "rms_norm_eps"),
        *("eagle_aux_hidden_state_layer_ids", "draft_vocab_size", "target_hidden_size", "max_position_embeddings"),
        *("rope_theta", "rope_parameters", "hidden_act", "tie_word_embeddings", "eagle_config"),
    )
)
"""Keys that are known with more at an end; `factor`, `head_dim` or `layer_types` end the keys of other programs."""

_MEANINGLESS = frozenset(
    (
        *("transformers_version", "speculators_version", "_name_or_path", "_commit_hash", "_attn_implementation"),
        *("attention_dropout", "bos_token_id", "eos_token_id", "initializer_range", "pad_token_id", "pretraining_tp"),
        "use_cache",
    )
)
"""Keys of config.json that change nothing a server computes."""

# What some program reads besides, and no drafter that was written here need have.
_READ = frozenset(
    (
        *(*_DECISIVE, *_PECULIAR, "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"),
        *("speculators_config", "transformer_layer_config", "text_config", "auto_map", "dtype", "torch_dtype", "bias"),
        *("num_aux_layers", "layer_ids", "mask_hidden", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"),
        *("qk_rope_head_dim", "v_head_dim", "rotary_emb_base", "mscale", "short_factor", "long_factor"),
    )
)


def means_nothing(key: str, now: Mapping[str, Any], then: Mapping[str, Any]) -> bool:
    """Whether a key in which two flat configs differ is read by no server: a known one, or one that was added."""
    *outer, last = key.split(".")
    outer = [name for name in outer if name != "transformer_layer_config"]
    return last in _MEANINGLESS or (key not in then and key in now and (*outer, last)[0] not in _READ)


def peculiar(places: Sequence[Mapping[str, Any]]) -> list[str]:
    """Values that only some programs know what to do with, one sentence each; `places` holds config and sections."""
    found = {key: place[key] for key in _PECULIAR for place in places if place.get(key) not in (None, *_PECULIAR[key])}
    why = dict.fromkeys(_PARALLEL, "so it drafts all tokens at once (P-EAGLE), which vLLM alone computes")
    other = "which not every program computes"
    return [f"{key} is {value!r}, {why.get(key, other)}" for key, value in found.items()]


def null(places: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Keys that must not be null and are, one sentence each: servers fail, or take their default."""
    for place in places:
        # Null as the base of a scaled or plain rope; at the top it may stand beside rope_parameters.
        keys = (*_NEVER_NULL, "rope_theta") if {"rope_type", "type"} & place.keys() else _NEVER_NULL
        yield from (f"{key} is null" for key in keys if key in place and place[key] is None)


def misspelt(places: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Keys that are nearly one that decides and is absent, one sentence each."""
    for place in places:
        absent = [meant for meant in _DECISIVE if meant not in place]
        for key in place.keys() - _READ - _MEANINGLESS:
            if (meant := next((one for one in absent if _meant(key, one)), None)) is not None:
                yield f"{key!r} is no key that any program reads: {meant} is missing, and a default would be taken"


def _meant(key: str, known: str) -> bool:
    """Whether a key is a known one that somebody misspelt or set aside (`norm_output_old`)."""
    if abs(len(key) - len(known)) <= 1:
        return _one_letter_apart(key.casefold().replace("-", "_"), known)
    return known in _UNMISTAKABLE and (key.startswith(f"{known}_") or key.endswith(f"_{known}"))


def _one_letter_apart(one: str, other: str) -> bool:
    """Whether at most a letter was changed, added or left out."""
    pairs = enumerate(zip(one, other, strict=False))
    same = next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
    left, right = one[same:], other[same:]
    return left[1:] in (right, right[1:]) or left == right[1:]
