"""The EAGLE-3 drafter: a decoder, llama-style or with latent attention, over the verifier's aux hidden states.

    aux states [T, A*H] -> (input_norm | fc_norm) -> fc -> h [T, H]
    layer 0:  x = cat(input_layernorm(embedding), hidden_norm(h))  -> attention -> + residual -> MLP
    layer i:  x = input_layernorm(h)                               -> attention -> + residual -> MLP
    head:     lm_head(norm(h)) over the draft vocabulary; h (norm(h) if norm_output) feeds the next TTT step

Attention of training-time test: at step s a row attends to the step-0 keys of all rows up to its own, and to its own
one key of each step 1 .. s. Serving does the same: step-0 keys are rows the verifier has confirmed, the others are
the draft chain of this round.

T rows of a document, R rows of this call, A aux states, H hidden, D draft vocabulary, n heads of width hd.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3_core.contract.drafter_config import MLA, DrafterConfig
from eagle3_core.errors import BadInput
from eagle3_core.model.rope import (
    inverse_frequencies,
    latent_scale,
    rotate,
    rotate_pairs,
    rotation,
    rotation_scale,
)

CosSin = tuple[Tensor, Tensor]
"""Rotation of some rows' positions."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean square taken in float32 at least."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as x."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps).to(x.dtype)


@dataclass
class LayerKeys:
    """Keys and values one layer has seen: confirmed rows of step 0, and the chain of later steps."""

    k_TnD: Tensor | None = None
    v_TnD: Tensor | None = None
    chain_k: list[Tensor] = field(default_factory=list)
    chain_v: list[Tensor] = field(default_factory=list)

    def append_rows(self, k_RnD: Tensor, v_RnD: Tensor) -> None:
        """Take step-0 rows behind the ones already there."""
        self.k_TnD = k_RnD if self.k_TnD is None else torch.cat((self.k_TnD, k_RnD))
        self.v_TnD = v_RnD if self.v_TnD is None else torch.cat((self.v_TnD, v_RnD))


class DrafterKeys:
    """The keys of all layers, for one document."""

    def __init__(self, num_layers: int) -> None:
        self.layers = [LayerKeys() for _ in range(num_layers)]

    @property
    def rows(self) -> int:
        """Confirmed rows held."""
        first = self.layers[0].k_TnD
        return 0 if first is None else first.shape[0]

    def drop_chain(self) -> None:
        """Forget the draft chain; the confirmed rows stay."""
        for layer in self.layers:
            layer.chain_k.clear()
            layer.chain_v.clear()


class Attention(nn.Module, ABC):
    """Attention of one layer over confirmed rows and the row's own chain; how queries and keys are made is not said."""

    o_proj: nn.Linear
    scale: float
    window: int | None

    @abstractmethod
    def a_projections(self) -> list[nn.Linear]:
        """What takes the layer's input: first for queries, the others for keys and values."""

    @abstractmethod
    def heads(self, projected: Sequence[Tensor], turned_q: CosSin, turned_k: CosSin) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [R, n, hd], keys [R', k, hd], both rotated, and values [R', k, vd] from what was projected."""

    def forward(self, x_RW: Tensor, rows_R: Tensor, step: int, cos_sin: CosSin, keys: LayerKeys) -> Tensor:
        """[R, H]; puts this call's keys into `keys`: as confirmed rows at step 0, as chain later.

        Args:
            x_RW: [R, W] layer input.
            rows_R: int64 [R], the confirmed row each query belongs to; it sees rows up to this one.
            step: TTT step, 0 for confirmed rows.
            cos_sin: rotation of the queries' and keys' positions.
            keys: what this layer saw before.
        """
        q, k, v = self.heads([linear(x_RW) for linear in self.a_projections()], cos_sin, cos_sin)
        if step == 0:
            keys.append_rows(k, v)
        else:
            keys.chain_k.append(k)
            keys.chain_v.append(v)
        return self.o_proj(self._attend(q, rows_R, keys).flatten(1))

    def _attend(self, q_RnD: Tensor, rows_R: Tensor, keys: LayerKeys) -> Tensor:
        assert keys.k_TnD is not None and keys.v_TnD is not None, "step 0 comes first"
        total, kv_heads = keys.k_TnD.shape[:2]
        # [kv, g, R, hd]: the queries that share a key head lie side by side.
        q = q_RnD.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3) * self.scale
        scores = q @ keys.k_TnD.permute(1, 2, 0)[:, None]
        places = torch.arange(total, device=q.device)[None, :]
        hidden_from = places > rows_R[:, None]
        if self.window is not None:
            hidden_from |= places <= rows_R[:, None] - self.window
        scores = scores.masked_fill(hidden_from, float("-inf"))
        own = [torch.einsum("kgrd,rkd->kgr", q, k)[..., None] for k in keys.chain_k]
        wide = torch.promote_types(q.dtype, torch.float32)
        weights = torch.cat((scores, *own), dim=-1).softmax(-1, dtype=wide).to(q.dtype)
        out = weights[..., :total] @ keys.v_TnD.transpose(0, 1)[:, None]
        for index, v in enumerate(keys.chain_v):
            out = out + weights[..., total + index, None] * v.transpose(0, 1)[:, None]
        return out.permute(2, 0, 1, 3).flatten(1, 2)


class GroupedAttention(Attention):
    """Queries in groups that share a key head, as Llama and Qwen3 have them."""

    def __init__(self, config: DrafterConfig, width: int) -> None:
        super().__init__()
        self.head_dim, self.scale = config.head_dim, config.head_dim**-0.5
        q_rows, kv_rows = (n * self.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        bias = config.attention_bias
        self.q_proj = nn.Linear(width, q_rows, bias=bias)
        self.k_proj = nn.Linear(width, kv_rows, bias=bias)
        self.v_proj = nn.Linear(width, kv_rows, bias=bias)
        self.o_proj = nn.Linear(q_rows, config.hidden_size, bias=bias)
        self.window, self.qk_norm = config.sliding_window, config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def a_projections(self) -> list[nn.Linear]:
        """q, k, v."""
        return [self.q_proj, self.k_proj, self.v_proj]

    def heads(self, projected: Sequence[Tensor], turned_q: CosSin, turned_k: CosSin) -> tuple[Tensor, Tensor, Tensor]:
        """See `Attention`."""
        q, k, v = (x.unflatten(1, (-1, self.head_dim)) for x in projected)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, turned_q), rotate(k, turned_k), v


class LatentAttention(Attention):
    """Queries from one latent, keys and values from another, one rotated part of the key shared by all heads (MLA).

    Source: DeepSeek-AI 2024, arXiv 2405.04434. A latent's norm takes the config's eps, as servers do.
    """

    window = None

    def __init__(self, config: DrafterConfig, mla: MLA, width: int) -> None:
        super().__init__()
        self.mla, heads, eps = mla, config.num_attention_heads, config.rms_norm_eps
        self.scale = mla.qk_head_dim**-0.5 * latent_scale(config.rope)
        self.q_a_proj = nn.Linear(width, mla.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(mla.q_lora_rank, eps)
        self.q_b_proj = nn.Linear(mla.q_lora_rank, heads * mla.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, mla.kv_lora_rank + mla.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(mla.kv_lora_rank, eps)
        self.kv_b_proj = nn.Linear(mla.kv_lora_rank, heads * (mla.qk_nope_head_dim + mla.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * mla.v_head_dim, config.hidden_size, bias=False)

    def a_projections(self) -> list[nn.Linear]:
        """Of the query latent; of the key-value latent with the shared part of the key."""
        return [self.q_a_proj, self.kv_a_proj_with_mqa]

    def heads(self, projected: Sequence[Tensor], turned_q: CosSin, turned_k: CosSin) -> tuple[Tensor, Tensor, Tensor]:
        """See `Attention`."""
        mla, (q_latent, kv_latent) = self.mla, projected
        kv_latent, k_shared = kv_latent.split((mla.kv_lora_rank, mla.qk_rope_head_dim), dim=1)
        q = _widened(q_latent, self.q_a_layernorm, self.q_b_proj).unflatten(1, (-1, mla.qk_head_dim))
        kv = _widened(kv_latent, self.kv_a_layernorm, self.kv_b_proj)
        k_own, v = kv.unflatten(1, (-1, mla.qk_nope_head_dim + mla.v_head_dim)).split(
            (mla.qk_nope_head_dim, mla.v_head_dim), dim=-1
        )
        q_own, q_turned = q.split((mla.qk_nope_head_dim, mla.qk_rope_head_dim), dim=-1)
        k_turned = rotate_pairs(k_shared[:, None], turned_k).expand(-1, k_own.shape[1], -1)
        q = torch.cat((q_own, rotate_pairs(q_turned, turned_q)), dim=-1)
        return q, torch.cat((k_own, k_turned), dim=-1), v


def _widened(latent: Tensor, norm: RMSNorm, linear: nn.Linear) -> Tensor:
    """linear(norm(latent)) in the dtype of the latent, which may be narrower than the weights'."""
    return F.linear(norm(latent), linear.weight.to(latent.dtype))


class MLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_RH: Tensor) -> Tensor:
        """[R, H] in and out."""
        return self.down_proj(F.silu(self.gate_proj(x_RH)) * self.up_proj(x_RH))


class Layer(nn.Module):
    """One decoder layer; the first one also takes the token embedding."""

    def __init__(self, config: DrafterConfig, index: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.first = index == 0
        self.norm_before_residual = config.norm_before_residual
        if self.first:
            self.hidden_norm = RMSNorm(hidden, eps)
        self.input_layernorm = RMSNorm(hidden, eps)
        width = 2 * hidden if self.first else hidden
        self.self_attn = (
            GroupedAttention(config, width) if config.mla is None else LatentAttention(config, config.mla, width)
        )
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = MLP(config)

    def forward(
        self,
        embedding_RH: Tensor,
        h_RH: Tensor,
        rows_R: Tensor,
        step: int,
        cos_sin: CosSin,
        keys: LayerKeys,
    ) -> Tensor:
        """[R, H], the stream behind this layer."""
        residual = h_RH
        if self.first:
            normed = self.hidden_norm(h_RH)
            if self.norm_before_residual:
                residual = normed
            x = torch.cat((self.input_layernorm(embedding_RH), normed), dim=-1)
        else:
            x = self.input_layernorm(h_RH)
        h_RH = residual + self.self_attn(x, rows_R, step, cos_sin, keys)
        return h_RH + self.mlp(self.post_attention_layernorm(h_RH))


class Eagle3Drafter(nn.Module):
    """The drafter; its parameter and buffer names are those of a speculators checkpoint.

    The embedding is the verifier's and stays as it is, unless it is trained. `d2t` (int64 [D], offsets) and `t2d`
    (bool [V]) are buffers.
    """

    inv_freq: Tensor
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        """Build with random weights.

        Raises:
            BadInput: an activation or rope type that is not computed here.
        """
        super().__init__()
        if config.hidden_act not in ("silu", "swish"):
            raise BadInput(f"hidden_act {config.hidden_act!r}: a drafter computes silu")
        self.config = config
        hidden, aux = config.hidden_size, config.num_aux_states * config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.embed_tokens.weight.requires_grad_(False)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(aux, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(hidden, config.rms_norm_eps) for _ in range(config.num_aux_states))
        self.fc = nn.Linear(aux, hidden, bias=False)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        if config.draft_vocab_size != config.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        turned = config.head_dim if config.mla is None else config.mla.qk_rope_head_dim
        self.register_buffer("inv_freq", inverse_frequencies(config.rope, turned), persistent=False)
        self.rope_scale = rotation_scale(config.rope)

    def rotation(self, positions_R: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine of int64 positions [R]: two [R, 1, hd / 2] of `dtype`."""
        return rotation(self.inv_freq, positions_R, dtype, self.rope_scale)

    def fuse(self, aux_RAH: Tensor) -> Tensor:
        """Aux states [R, A, H] -> the drafter's first hidden state [R, H]."""
        if self.config.fc_norm:
            aux_RAH = torch.stack([norm(aux_RAH[:, slot]) for slot, norm in enumerate(self.fc_norm)], dim=1)
        flat = aux_RAH.flatten(1)
        return self.fc(self.input_norm(flat) if self.config.norm_before_fc else flat)

    def step(self, ids_R: Tensor, h_RH: Tensor, rows_R: Tensor, step: int, keys: DrafterKeys) -> Tensor:
        """One TTT step, or one drafted token.

        Args:
            ids_R: int64 [R], token that joins each row: t + 1 + step for row t.
            h_RH: [R, H], `fuse` of the aux states at step 0, the hidden state of the step before later on.
            rows_R: int64 [R], row number t of each.
            step: 0, 1, ...
            keys: keys so far; this call adds its own.

        Returns:
            [R, H] stream behind the last layer; give it to `logits` and to `carry`.
        """
        embedding = self.embed_tokens(ids_R).to(h_RH.dtype)
        cos_sin = self.rotation(rows_R + step, h_RH.dtype)
        for layer, layer_keys in zip(self.layers, keys.layers, strict=True):
            h_RH = layer(embedding, h_RH, rows_R, step, cos_sin, layer_keys)
        return h_RH

    def carry(self, h_RH: Tensor) -> Tensor:
        """The hidden state [R, H] the next step starts from."""
        return self.norm(h_RH) if self.config.norm_output else h_RH

    def logits(self, h_RH: Tensor) -> Tensor:
        """[R, D], over draft ids."""
        return self.lm_head(self.norm(h_RH))

    def draft_to_target(self) -> Tensor:
        """int64 [D], the verifier token of each draft id."""
        ids = torch.arange(self.config.draft_vocab_size, device=self.fc.weight.device)
        return ids if self.config.draft_vocab_size == self.config.vocab_size else ids + self.d2t
