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
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3_core.contract.drafter_config import DrafterConfig
from eagle3_core.model.drafter import CosSin, Eagle3Drafter, Layer, RMSNorm
from eagle3_core.training.attention import attend
from eagle3_core.training.functions import (
    WeightSum,
    collect,
    gated_mlp,
    normed_projections,
    residual_linear,
    rms_norm,
)
from eagle3_core.training.losses import Loss
from eagle3_core.training.rows import Index, Plan, StepRows, plan_rows, take
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
    rows = [document.rows_KR for document in documents]
    plan = plan_rows(rows, config.num_hidden_layers, config.sliding_window, device)
    cut = list(zip(documents, plan.key_rows, plan.slots, strict=True))
    last = _joined([document.last_TH[1 : 1 + slots] for document, _, slots in cut])
    return Pack(
        plan,
        _joined([document.token_ids_T[1 : 1 + slots] for document, _, slots in cut]).to(device),
        _joined([document.aux_TAH[:rows] for document, rows, _ in cut]).to(device, dtype),
        take(last, plan.target_slots).to(device, dtype),
    )


def _joined(parts: list[Tensor]) -> Tensor:
    """One behind the other; one alone is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


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
    total, scores = score(states, head_DH, pack.last_CH, target_head, pack.plan, weights, loss)
    nothing = torch.zeros((), dtype=torch.int64, device=total.device)
    empty = StepScore(nothing.to(total.dtype), nothing, 0)
    return total, scores + [empty] * (len(weights) - len(scores))


def unroll(drafter: Eagle3Drafter, pack: Pack, dtype: torch.dtype) -> list[Tensor]:
    """norm(h) [U, H] of the rows of each step, as head and next step see it."""
    plan = pack.plan
    embedding_MH = drafter.embed_tokens(pack.ids_M).to(dtype)
    layers = [_LayerRun(cast(Layer, layer), dtype) for layer in drafter.layers]
    layers[0].join(embedding_MH, plan)
    h = collect(_fuse(drafter, pack.aux_NAH.to(dtype)), [weight for layer in layers for weight in layer.weights()])
    states: list[Tensor] = []
    for step, rows in enumerate(plan.steps):
        turned = drafter.rotation(rows.positions_U, dtype)
        if step == 0:
            turned_N = drafter.rotation(plan.positions_N, dtype)
            for layer in layers[:-1]:
                h = layer.first_step(h, plan, plan.all_rows, turned_N, turned_N)
            h = layers[-1].first_step(h, plan, rows, turned_N, turned)
        else:
            h = take(h, rows.earlier[-1])
            for layer in layers:
                h = layer.later_step(h, rows, turned)
        state = _norm(drafter.norm, h)
        states.append(state)
        h = state if drafter.config.norm_output else h
    return states


def _fuse(drafter: Eagle3Drafter, aux_NAH: Tensor) -> Tensor:
    """`Eagle3Drafter.fuse`, [N, H]."""
    if drafter.config.fc_norm:
        norms = [cast(RMSNorm, norm) for norm in drafter.fc_norm]
        aux_NAH = torch.stack([_norm(norm, aux_NAH[:, slot]) for slot, norm in enumerate(norms)], dim=1)
    flat = aux_NAH.flatten(1)
    if drafter.config.norm_before_fc:
        flat = _norm(drafter.input_norm, flat)
    return flat @ drafter.fc.weight.to(flat.dtype).T


def _norm(norm: RMSNorm, x: Tensor) -> Tensor:
    return rms_norm(x, norm.weight, norm.eps)


class _LayerRun:
    """One layer during one unroll: its weights in the dtype of computation, and the keys it has seen.

    The first layer's projections come in halves, [O, 2H] = [O, H] of the embedding beside [O, H] of the hidden state.
    """

    def __init__(self, layer: Layer, dtype: torch.dtype) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.layer = layer
        self.norm = layer.hidden_norm if layer.first else layer.input_layernorm
        linears = attention.a_projections()
        full = [linear.weight.to(dtype) for linear in linears]
        self.biases = [None if linear.bias is None else linear.bias.to(dtype) for linear in linears]
        if layer.first:
            halves = [weight.split(weight.shape[1] // 2, dim=1) for weight in full]
            self.of_embedding, full = [half[0] for half in halves], [half[1] for half in halves]
        self.inputs = [WeightSum(weight) for weight in full]
        self.o = WeightSum(attention.o_proj.weight.to(dtype))
        self.o_bias = None if attention.o_proj.bias is None else attention.o_proj.bias.to(dtype)
        self.mlp = [WeightSum(linear.weight.to(dtype)) for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
        self.chain: list[tuple[Tensor, Tensor]] = []

    def weights(self) -> list[WeightSum]:
        """All whose gradients are summed."""
        return [*self.inputs, self.o, *self.mlp]

    def join(self, embedding_MH: Tensor, plan: Plan) -> None:
        """The embedding's half of the first layer's projections, for all slots."""
        e_MH = _norm(self.layer.input_layernorm, embedding_MH)
        inputs = (take(e_MH, plan.query_slots), *[e_MH] * (len(self.inputs) - 1))
        self.joined = [F.linear(*each) for each in zip(inputs, self.of_embedding, self.biases, strict=True)]

    def first_step(self, h_NH: Tensor, plan: Plan, rows: StepRows, turned_N: CosSin, turned_U: CosSin) -> Tensor:
        """Step 0: keys of all N rows, and the stream [U, H] behind this layer of the given ones."""
        places, slots = rows.places, (rows.query_slots, plan.key_slots)
        q, k, v = self._project(h_NH, (places, slice(0, len(h_NH))), slots, turned_U, turned_N)
        self.keys_kND, self.values_kND = (x.transpose(0, 1).contiguous() for x in (k, v))
        return self._rest(take(self._residual(h_NH), places), q, rows)

    def later_step(self, h_UH: Tensor, rows: StepRows, turned_U: CosSin) -> Tensor:
        """A later step: one more key of each row, and the stream [U, H] behind this layer."""
        everything = slice(0, len(h_UH))
        q, k, v = self._project(h_UH, (everything, everything), (rows.query_slots, rows.slots), turned_U, turned_U)
        self.chain.append((k, v))
        return self._rest(self._residual(h_UH), q, rows)

    def _project(
        self, h: Tensor, places: tuple[Index, Index], slots: tuple[Index, Index], turned_q: CosSin, turned_k: CosSin
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [rows, heads, width], rotated; places and slots are first the queries', then the
        keys'.
        """
        others = len(self.inputs) - 1
        added = self.biases
        if self.layer.first:
            each = (slots[0], *[slots[1]] * others)
            added = [take(joined, index) for joined, index in zip(self.joined, each, strict=True)]
        rows = (places[0], *[places[1]] * others)
        out = normed_projections(h, self.norm.weight, self.norm.eps, self.inputs, rows, added)
        return self.layer.self_attn.heads(out, turned_q, turned_k)

    def _residual(self, h: Tensor) -> Tensor:
        return _norm(self.norm, h) if self.layer.first and self.layer.norm_before_residual else h

    def _rest(self, residual_UH: Tensor, q_UnD: Tensor, rows: StepRows) -> Tensor:
        """Attention, output and MLP."""
        attention = self.layer.self_attn
        attended = attend(
            q_UnD, self.keys_kND, self.values_kND, self.chain, rows.blocks, attention.scale, attention.window
        )
        h_UH = residual_linear(residual_UH, attended.flatten(1), self.o)
        if self.o_bias is not None:
            h_UH = h_UH + self.o_bias
        norm = self.layer.post_attention_layernorm
        return gated_mlp(h_UH, norm.weight, norm.eps, *self.mlp)
