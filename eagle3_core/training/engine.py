"""Training-time test over a pack of documents: the drafter unrolled on the rows that count, scored, ready for backward.

What the first layer makes of a token's embedding does not depend on the TTT step: row t joins at step s the token that
row t + 1 joined at step s - 1. So each half of its projections is computed apart, the embedding's once a token slot:

    q, k, v (row t, step s) = W_embedding norm(embedding[slot t + s])  +  W_hidden norm(h_t)
                              computed once for all steps                 computed for the rows of the step

See `rows` for which rows those are, `attention` and `score` for what is done in blocks.

N key rows, M token slots, C targets, U rows of a step, A aux states, H hidden, n heads and k key heads of width D.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3_core.model.config import DrafterConfig
from eagle3_core.model.drafter import Eagle3Drafter, Layer, RMSNorm
from eagle3_core.model.rope import rotate, rotation
from eagle3_core.training.attention import attend
from eagle3_core.training.functions import gated_mlp, rms_norm
from eagle3_core.training.losses import Loss
from eagle3_core.training.rows import Index, Plan, StepRows, as_index, plan_rows, take
from eagle3_core.training.score import StepScore, TargetHead, score


@dataclass(frozen=True)
class Document:
    """One document as it is stored.

    Attributes:
        token_ids_T: int64 [T].
        aux_TAH: [T, A, H] aux states, noise already added.
        last_TH: [T, H] the verifier's last states.
        rows_KR: bool [K, T - 1], the rows that count (`counted_rows`).
    """

    token_ids_T: Tensor
    aux_TAH: Tensor
    last_TH: Tensor
    rows_KR: Tensor


@dataclass(frozen=True)
class Pack:
    """What the loss of some documents depends on, and nothing else: int64 [M], [N, A, H], [C, H]."""

    plan: Plan
    ids_M: Tensor
    aux_NAH: Tensor
    last_CH: Tensor


def make_pack(
    documents: Sequence[Document], config: DrafterConfig, device: torch.device, dtype: torch.dtype = torch.float32
) -> Pack:
    """Put documents one behind the other, cut to the rows that count; states become `dtype` on `device`."""
    plan = plan_rows([document.rows_KR for document in documents], config.num_hidden_layers)
    cut = list(zip(documents, plan.key_rows, plan.slots, strict=True))
    last = torch.cat([document.last_TH[1 : 1 + slots] for document, _, slots in cut])
    return Pack(
        plan,
        torch.cat([document.token_ids_T[1 : 1 + slots] for document, _, slots in cut]).to(device),
        torch.cat([document.aux_TAH[:rows] for document, rows, _ in cut]).to(device, dtype),
        take(last, plan.target_slots).to(device, dtype),
    )


def score_pack(
    drafter: Eagle3Drafter,
    target_head: TargetHead,
    pack: Pack,
    weights: Sequence[float],
    loss: Loss | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, list[StepScore]]:
    """Unroll the drafter over a pack and score every step on its counted rows.

    Args:
        drafter: the model; gradients flow into it.
        target_head: the verifier's logits over the draft vocabulary.
        pack: the documents.
        weights: what a row's loss counts at each of the K steps.
        loss: see `losses.mixture`; None: forward KL.
        dtype: of products and of the stream between them; None: the weights' own.

    Returns:
        The weighted sum of the steps' losses, a scalar to go backward from, and K scores without gradients.
    """
    states = unroll(drafter, pack, dtype or drafter.fc.weight.dtype)
    head_DH = drafter.lm_head.weight.to(dtype or drafter.lm_head.weight.dtype)
    steps = pack.plan.steps
    total, scores = score(states, head_DH, pack.last_CH, target_head, steps, weights[: len(steps)], loss)
    nothing = torch.zeros((), dtype=torch.int64, device=total.device)
    empty = StepScore(nothing.to(total.dtype), nothing, 0)
    return total, scores + [empty] * (len(weights) - len(steps))


def unroll(drafter: Eagle3Drafter, pack: Pack, dtype: torch.dtype) -> list[Tensor]:
    """norm(h) [U, H] of the rows of each step, as head and next step see it."""
    plan = pack.plan
    embedding_MH = drafter.embed_tokens(pack.ids_M).to(dtype)
    layers = [_LayerRun(layer, dtype) for layer in drafter.layers]
    layers[0].join(embedding_MH, plan)
    h = _fuse(drafter, pack.aux_NAH.to(dtype))
    states: list[Tensor] = []
    for step, rows in enumerate(plan.steps):
        if step == 0:
            for layer in layers:
                h = layer.first_step(h, plan, rows if layer is layers[-1] else plan.all_rows, drafter.inv_freq)
        else:
            h = take(h, rows.earlier[-1])
            for layer in layers:
                h = layer.later_step(h, rows, drafter.inv_freq)
        state = _norm(drafter.norm, h)
        states.append(state)
        h = state if drafter.config.norm_output else h
    return states


def _fuse(drafter: Eagle3Drafter, aux_NAH: Tensor) -> Tensor:
    """`Eagle3Drafter.fuse`, [N, H]."""
    if drafter.config.fc_norm:
        aux_NAH = torch.stack([_norm(norm, aux_NAH[:, slot]) for slot, norm in enumerate(drafter.fc_norm)], dim=1)
    flat = aux_NAH.flatten(1)
    if drafter.config.norm_before_fc:
        flat = _norm(drafter.input_norm, flat)
    return flat @ drafter.fc.weight.to(flat.dtype).T


def _norm(norm: RMSNorm, x: Tensor) -> Tensor:
    return rms_norm(x, norm.weight, norm.eps)


class _Projection:
    """W_embedding e + W_hidden x + bias of the first layer, W x + bias of a later one; [R, heads, D]."""

    def __init__(self, linear: nn.Linear, heads: int, dtype: torch.dtype) -> None:
        self.weight, self.heads = linear.weight.to(dtype), heads
        self.bias = None if linear.bias is None else linear.bias.to(dtype)
        self.joined: Tensor | None = None

    def join(self, embedding: Tensor) -> None:
        """Compute the embedding's half."""
        of_embedding, self.weight = self.weight.split(embedding.shape[1], dim=1)
        self.joined = F.linear(embedding, of_embedding, self.bias)

    def __call__(self, x: Tensor, slots: Index) -> Tensor:
        out = (
            F.linear(x, self.weight, self.bias)
            if self.joined is None
            else torch.addmm(take(self.joined, slots), x, self.weight.T)
        )
        return out.view(len(x), self.heads, -1)


class _LayerRun:
    """One layer during one unroll: its weights in the dtype of computation, and the keys it has seen."""

    def __init__(self, layer: Layer, dtype: torch.dtype) -> None:
        self.layer, attention = layer, layer.self_attn
        self.q = _Projection(attention.q_proj, attention.heads, dtype)
        self.k = _Projection(attention.k_proj, attention.kv_heads, dtype)
        self.v = _Projection(attention.v_proj, attention.kv_heads, dtype)
        self.o, self.o_bias = attention.o_proj.weight.to(dtype), attention.o_proj.bias
        mlp = layer.mlp
        self.mlp = tuple(linear.weight.to(dtype) for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        self.chain: list[tuple[Tensor, Tensor]] = []

    def join(self, embedding_MH: Tensor, plan: Plan) -> None:
        """Take in the embeddings of all slots."""
        e_MH = _norm(self.layer.input_layernorm, embedding_MH)
        self.q.join(take(e_MH, plan.query_slots))
        self.k.join(e_MH)
        self.v.join(e_MH)

    def first_step(self, h_NH: Tensor, plan: Plan, rows: StepRows, inv_freq: Tensor) -> Tensor:
        """Step 0: keys of all N rows, and the stream [U, H] behind this layer of the given ones."""
        x, residual = self._input(h_NH)
        cos_sin = rotation(inv_freq, plan.positions_N.to(x.device), x.dtype)
        self.keys_kND = rotate(self.k(x, plan.key_slots), cos_sin).transpose(0, 1).contiguous()
        self.values_kND = self.v(x, plan.key_slots).transpose(0, 1).contiguous()
        places = as_index(rows.keys_U)
        return self._rest(take(x, places), take(residual, places), rows, inv_freq)

    def later_step(self, h_UH: Tensor, rows: StepRows, inv_freq: Tensor) -> Tensor:
        """A later step: one more key of each row, and the stream [U, H] behind this layer."""
        x, residual = self._input(h_UH)
        cos_sin = rotation(inv_freq, rows.positions_U.to(x.device), x.dtype)
        self.chain.append((rotate(self.k(x, rows.slots), cos_sin), self.v(x, rows.slots)))
        return self._rest(x, residual, rows, inv_freq)

    def _input(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """What queries, keys and values are made of, and the residual."""
        norm = self.layer.hidden_norm if self.layer.first else self.layer.input_layernorm
        x = _norm(norm, h)
        return x, x if self.layer.first and self.layer.norm_before_residual else h

    def _rest(self, x_UH: Tensor, residual_UH: Tensor, rows: StepRows, inv_freq: Tensor) -> Tensor:
        """Queries, attention, output and MLP."""
        cos_sin = rotation(inv_freq, rows.positions_U.to(x_UH.device), x_UH.dtype)
        q = rotate(self.q(x_UH, rows.query_slots), cos_sin)
        attended = attend(q, self.keys_kND, self.values_kND, self.chain, rows)
        h_UH = torch.addmm(residual_UH, attended.flatten(1), self.o.T)
        if self.o_bias is not None:
            h_UH = h_UH + self.o_bias.to(h_UH.dtype)
        return gated_mlp(h_UH, _norm(self.layer.post_attention_layernorm, h_UH), *self.mlp)
