"""What each family of verifiers does behind its last layer, and what its class assumes where config.json is silent.

    logits = softcap(scale * head @ rms_norm(state, eps) * (gain_offset + weight))      softcap(x) = cap * tanh(x / cap)

One row a model_type. Source of every row: configuration and modelling files of that type in transformers 5.19.0 (gain:
`1.0 + self.weight` in its RMSNorm; scale and soft-cap: what follows `lm_head` in its forward); of `minicpm`, the code
that lies beside its weights. A family that is not here is read by the names of its keys, and extraction compares the
logits that result with the verifier's own.

Some families multiply the token embedding (Gemma by sqrt(hidden_size), Granite by `embedding_multiplier`). A drafter
takes the matrix as it is stored, as under vLLM and SGLang, which share the bare matrix with it. The drafter's first
norm takes a common factor away in any case.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Scale = Literal["multiply", "divide", "width"]


@dataclass(frozen=True)
class Family:
    """One row.

    gain_offset: added to the weight of the final norm.
    layer_norm: the final norm is a LayerNorm, without a bias that would show it.
    tied: whether embedding and head are one where the config leaves the flag out.
    eps: of the final norm, where the config leaves it out.
    rope_theta: likewise.
    scale: (key, what is done with it) of the logits: multiplied, divided, or multiplied by key / hidden_size.
    softcap: key of the cap.
    default_softcap: where the config leaves it out.
    """

    gain_offset: float = 0.0
    layer_norm: bool = False
    tied: bool | None = None
    eps: float = 1e-6
    rope_theta: float = 1e4
    scale: tuple[tuple[str, Scale], ...] = ()
    softcap: str | None = None
    default_softcap: float | None = None


_PLAIN = Family(tied=False)
_EPS5 = Family(tied=False, eps=1e-5)
_CAP = "final_logit_softcapping"
_GEMMA = Family(gain_offset=1.0, tied=True, softcap=_CAP)
_GEMMA3 = replace(_GEMMA, rope_theta=1e6)
_GEMMA4 = replace(_GEMMA3, gain_offset=0.0)
_QWEN3_5 = Family(gain_offset=1.0, tied=False)
_QWEN_VL = Family(rope_theta=1e6)
_GRANITE = Family(tied=False, scale=(("logits_scaling", "divide"),))
_COHERE = Family(layer_norm=True, tied=True, scale=(("logit_scale", "multiply"),))
_MINICPM = Family(tied=True, eps=1e-5, scale=(("dim_model_base", "width"),))
_LFM2 = Family(tied=True, eps=1e-5, rope_theta=1e6)

FAMILIES: dict[str, Family] = {
    "afmoe": _EPS5,
    "apertus": replace(_EPS5, rope_theta=1.2e7),
    "arcee": _EPS5,
    "aria_text": _PLAIN,
    "axk1": _PLAIN,
    "axk2": _PLAIN,
    "bamba": _EPS5,
    "bitnet": replace(_EPS5, rope_theta=5e5),
    "cohere": replace(_COHERE, rope_theta=5e5),
    "cohere2": _COHERE,
    "cohere2_moe": _COHERE,
    "cohere_compass_text": _COHERE,
    "cwm": replace(_EPS5, rope_theta=1e6),
    "dbrx": replace(_PLAIN, layer_norm=True),
    "deepseek_ocr2_text": _PLAIN,
    "deepseek_v2": _PLAIN,
    "deepseek_v3": _PLAIN,
    "deepseek_v32": _PLAIN,
    "diffllama": _EPS5,
    "doge": _PLAIN,
    "dots1": _PLAIN,
    "emu3_text_model": replace(_EPS5, rope_theta=1e6),
    "ernie4_5": Family(tied=True, eps=1e-5, rope_theta=5e5),
    "ernie4_5_moe": Family(tied=True, eps=1e-5, rope_theta=5e5),
    "ernie4_5_vl_moe_text": Family(tied=True, eps=1e-5, rope_theta=5e5),
    "exaone4": _EPS5,
    "exaone_moe": _EPS5,
    "falcon_h1": replace(_EPS5, scale=(("lm_head_multiplier", "multiply"),)),
    "flex_olmo": replace(_PLAIN, rope_theta=5e5),
    "gemma": replace(_GEMMA, softcap=None),
    "gemma2": replace(_GEMMA, default_softcap=30.0),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma3n_text": replace(_GEMMA4, default_softcap=30.0),
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "glm": replace(_PLAIN, eps=1.5625e-07),
    "glm4": replace(_PLAIN, eps=1.5625e-07),
    "glm4_moe": _EPS5,
    "glm4_moe_lite": _EPS5,
    "glm4v_moe_text": _EPS5,
    "glm4v_text": Family(eps=1e-5),
    "glm_moe_dsa": _EPS5,
    "gpt_oss": replace(_EPS5, rope_theta=1.5e5),
    "granite": _GRANITE,
    "granite_swa": replace(_GRANITE, tied=True, eps=1e-5),
    "granitemoe": _GRANITE,
    "granitemoe_swa": _GRANITE,
    "granitemoehybrid": _GRANITE,
    "granitemoeshared": _GRANITE,
    "helium": replace(_PLAIN, eps=1e-8, rope_theta=1e5),
    "hunyuan_v1_dense": _EPS5,
    "hunyuan_v1_moe": _EPS5,
    "hunyuan_vl_text": Family(tied=True, eps=1e-5),
    "hy_v3": replace(_EPS5, rope_theta=11158840.0),
    "hyperclovax": replace(_PLAIN, scale=(("logits_scaling", "multiply"),)),
    "jamba": _PLAIN,
    "jetmoe": Family(tied=True),
    "kimi_k2": _PLAIN,
    "kimi_linear": _EPS5,
    "laguna": replace(_PLAIN, rope_theta=5e5),
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "llama": _PLAIN,
    "llama4_text": replace(_EPS5, rope_theta=5e5),
    "longcat_flash": replace(_EPS5, rope_theta=1e7),
    "mellum": replace(_PLAIN, rope_theta=5e5),
    "mimo_v2_flash": replace(_EPS5, rope_theta=5e6),
    "minicpm": _MINICPM,
    "minicpm3": _MINICPM,
    "minimax": replace(_EPS5, rope_theta=1e6),
    "minimax_m2": replace(_PLAIN, rope_theta=5e6),
    "minimax_m3_vl_text": replace(_PLAIN, gain_offset=1.0, rope_theta=5e6),
    "ministral": _PLAIN,
    "ministral3": replace(_EPS5, rope_theta=1e6),
    "mistral": _PLAIN,
    "mistral4": _PLAIN,
    "mixtral": replace(_EPS5, rope_theta=1e6),
    "mllama_text_model": replace(_EPS5, rope_theta=5e5),
    "mpt": replace(_PLAIN, layer_norm=True, tied=True),
    "muse_glimmer_text": Family(
        tied=False,
        eps=1e-5,
        scale=(("output_multiplier", "multiply"),),
        softcap=_CAP,
        default_softcap=20.0,
    ),
    "nemotron_h": _EPS5,
    "olmo2": _EPS5,
    "olmo3": replace(_EPS5, rope_theta=5e5),
    "olmo_hybrid": _PLAIN,
    "olmoe": _EPS5,
    "paligemma": replace(_GEMMA, softcap=None),
    "phi3": _EPS5,
    "phi4_multimodal": _EPS5,
    "qwen2": _PLAIN,
    "qwen2_5_omni_text": _QWEN_VL,
    "qwen2_5_vl_text": replace(_QWEN_VL, eps=1e-5),
    "qwen2_moe": _PLAIN,
    "qwen2_vl_text": replace(_QWEN_VL, eps=1e-5),
    "qwen3": _PLAIN,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_moe": _PLAIN,
    "qwen3_next": _QWEN3_5,
    "qwen3_omni_moe_text": _QWEN_VL,
    "qwen3_vl_moe_text": replace(_QWEN_VL, rope_theta=5e5),
    "qwen3_vl_text": replace(_QWEN_VL, rope_theta=5e5),
    "recurrent_gemma": replace(_GEMMA, softcap="logits_soft_cap", default_softcap=30.0),
    "seed_oss": _PLAIN,
    "shieldgemma2": _GEMMA3,
    "smollm3": Family(tied=True, rope_theta=2e6),
    "solar_open": replace(_EPS5, rope_theta=1e6),
    "step3p5": Family(gain_offset=1.0, tied=False, eps=1e-5),
    "step3p7": Family(gain_offset=1.0, tied=False, eps=1e-5),
    "vaultgemma": replace(_GEMMA, default_softcap=30.0),
    "youtu": Family(tied=True),
    "zaya": Family(tied=True, eps=1e-5),
}

UNKNOWN = Family(
    scale=(
        ("logit_scale", "multiply"),
        ("logits_scaling", "divide"),
        ("lm_head_multiplier", "multiply"),
        ("output_multiplier", "multiply"),
    ),
    softcap=_CAP,
)
"""How a family that is not in the table is read."""


def family_of(model_types: Iterable[str]) -> Family | None:
    """The row of the first model_type that has one; a wrapper's comes behind that of its text config."""
    return next((FAMILIES[kind] for kind in model_types if kind in FAMILIES), None)
