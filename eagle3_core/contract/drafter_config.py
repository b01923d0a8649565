"""What a drafter looks like: one class, and the tensors that follow from it.

A aux states, H hidden, I intermediate, V verifier vocabulary, D draft vocabulary, nq / nkv heads of width hd.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class DrafterConfig(BaseModel):
    """Everything that decides what a drafter computes. Formats of checkpoints are read into and written from this."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    num_hidden_layers: int = Field(1, ge=1)
    vocab_size: int = Field(ge=1, description="the verifier's")
    draft_vocab_size: int = Field(ge=1)
    aux_layer_ids: tuple[int, ...] | None = Field(description="id k is the state entering layer k; None: not stated")
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048
    rope: dict[str, Any] = Field(description='{"rope_type", "rope_theta", scaling fields ...}')
    hidden_act: str = "silu"
    attention_bias: bool = False
    num_aux_states: int = Field(3, ge=1, description="A")
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = Field(False, description="RMSNorm of each head's queries and keys, as Qwen3 has")
    sliding_window: int | None = Field(None, ge=1, description="step-0 keys a row sees, its own included; None: all")
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None


def expected_tensors(config: DrafterConfig) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, kind) of every tensor a checkpoint of this drafter holds; kind is float, int64 or bool.

    Source: the speculators format; names as in speculators 0.3.0 to 0.9.0.
    """
    hidden, aux = config.hidden_size, config.num_aux_states * config.hidden_size
    q_rows = config.num_attention_heads * config.head_dim
    kv_rows = config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config.vocab_size, hidden),
        "fc.weight": (hidden, aux),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
    }
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (aux,)
    if config.fc_norm:
        shapes |= {f"fc_norm.{index}.weight": (hidden,) for index in range(config.num_aux_states)}
    for index in range(config.num_hidden_layers):
        layer = f"layers.{index}."
        width = 2 * hidden if index == 0 else hidden
        projections = {"q": (q_rows, width), "k": (kv_rows, width), "v": (kv_rows, width), "o": (hidden, q_rows)}
        for name, shape in projections.items():
            shapes[f"{layer}self_attn.{name}_proj.weight"] = shape
            if config.attention_bias:
                shapes[f"{layer}self_attn.{name}_proj.bias"] = shape[:1]
        if config.qk_norm:
            shapes |= {f"{layer}self_attn.{name}_norm.weight": (config.head_dim,) for name in ("q", "k")}
        shapes |= {
            f"{layer}input_layernorm.weight": (hidden,),
            f"{layer}post_attention_layernorm.weight": (hidden,),
            f"{layer}mlp.gate_proj.weight": (config.intermediate_size, hidden),
            f"{layer}mlp.up_proj.weight": (config.intermediate_size, hidden),
            f"{layer}mlp.down_proj.weight": (hidden, config.intermediate_size),
        }
        if index == 0:
            shapes[f"{layer}hidden_norm.weight"] = (hidden,)
    expected = {name: (shape, "float") for name, shape in shapes.items()}
    if config.draft_vocab_size != config.vocab_size:
        expected["d2t"] = ((config.draft_vocab_size,), "int64")
        expected["t2d"] = ((config.vocab_size,), "bool")
    return expected
