"""Attention of training-time test, in blocks, its scores computed anew in the backward pass.

A query of step s attends to the step-0 keys of its document up to its own row, and to its own key of each step
1 .. s. The first part is a softmax over a block of scores; the second, one number a query and step, is merged in by
the two parts' log-sum-exp:

    out = softmax(S) V * exp(lse_S - lse) + sum_j exp(c_j - lse) v_j,    lse = log(exp(lse_S) + sum_j exp(c_j))

U queries of a step, B of a block, N step-0 keys, K of a block, n heads, k key heads, g = n / k, D width of a query or
key, Dv of a value (D but for latent attention).
Source: the online softmax of Milakov and Gimelshein 2018; Dao et al. 2022 for the backward pass.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eagle3_core.training.rows import Block, Index, add_to, take


def attend(
    q_UnD: Tensor,
    k_kND: Tensor,
    v_kND: Tensor,
    chain: list[tuple[Tensor, Tensor]],
    blocks: Sequence[Block],
    scale: float,
    window: int | None = None,
) -> Tensor:
    """[U, n, Dv], the attended values.

    Args:
        q_UnD: rotated queries.
        k_kND: rotated keys of step 0, contiguous.
        v_kND: their values.
        chain: keys and values of steps 1 .. s, each [U_j, k, D] for that step's own rows.
        blocks: how the rows of this step attend.
        scale: of the scores.
        window: sliding window over the step-0 keys; None: none.
    """
    flat = [tensor for pair in chain for tensor in pair]
    return _Attend.apply(blocks, scale, window, q_UnD, k_kND, v_kND, *flat)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        blocks: Sequence[Block],
        scale: float,
        window: int | None,
        q_UnD: Tensor,
        k_kND: Tensor,
        v_kND: Tensor,
        *chain: Tensor,
    ) -> Tensor:
        out_UnD = q_UnD.new_empty((*q_UnD.shape[:2], v_kND.shape[-1]))
        kv_heads = k_kND.shape[0]
        lse_kgU = q_UnD.new_empty((kv_heads, q_UnD.shape[1] // kv_heads, q_UnD.shape[0]), dtype=_wide(q_UnD.dtype))
        for block in blocks:
            q = _by_key_head(q_UnD[block.queries], kv_heads) * scale
            p, lse_S = _softmax(q, k_kND, block, window)
            out = _mm(p, v_kND[:, block.keys]).unflatten(1, q.shape[1:3])
            own = [_own_scores(q, k) for k in _own(chain[0::2], block)]
            lse = torch.logsumexp(torch.stack((lse_S, *own)), dim=0)
            out = out * (lse_S - lse).exp()[..., None]
            for score, v in zip(own, _own(chain[1::2], block), strict=True):
                out += (score - lse).exp()[..., None] * v
            lse_kgU[..., block.queries] = lse
            out_UnD[block.queries] = _by_query(out)
        ctx.blocks, ctx.scale, ctx.window = blocks, scale, window
        ctx.save_for_backward(q_UnD, k_kND, v_kND, out_UnD, lse_kgU, *chain)
        return out_UnD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        blocks, scale, window = ctx.blocks, ctx.scale, ctx.window
        q_UnD, k_kND, v_kND, out_UnD, lse_kgU, *chain = ctx.saved_tensors
        d_out_UnD, kv_heads = grads[0], k_kND.shape[0]
        d_q_UnD = torch.empty_like(q_UnD)
        d_k_kND, d_v_kND = torch.zeros_like(k_kND), torch.zeros_like(v_kND)
        d_chain = [torch.zeros_like(tensor) for tensor in chain]
        for block in blocks:
            q = _by_key_head(q_UnD[block.queries], kv_heads) * scale
            d_out = _by_key_head(d_out_UnD[block.queries], kv_heads)
            lse = lse_kgU[..., block.queries]
            delta = (d_out * _by_key_head(out_UnD[block.queries], kv_heads)).sum(-1, dtype=lse.dtype)
            p, lse_S = _softmax(q, k_kND, block, window)
            p *= (lse_S - lse).exp().flatten(1)[..., None]
            keys, values = k_kND[:, block.keys], v_kND[:, block.keys]
            d_v_kND[:, block.keys] += _mm(p.transpose(1, 2), d_out.flatten(1, 2))
            d_p = _mm(d_out.flatten(1, 2), values.transpose(1, 2)).to(p.dtype)
            d_s = d_p.sub_(delta.flatten(1)[..., None]).mul_(p)
            d_q = _mm(d_s, keys).view_as(q)
            d_k_kND[:, block.keys] += _mm(d_s.transpose(1, 2), q.flatten(1, 2))
            own_k, own_v = _own(chain[0::2], block), _own(chain[1::2], block)
            for step, (k, v) in enumerate(zip(own_k, own_v, strict=True)):
                weight = (_own_scores(q, k) - lse).exp()
                d_score = weight * ((d_out * v).sum(-1) - delta)
                d_q += d_score[..., None] * k
                _add_own(d_chain[2 * step], block.chain[step], d_score[..., None] * q)
                _add_own(d_chain[2 * step + 1], block.chain[step], weight[..., None] * d_out)
            d_q_UnD[block.queries] = _by_query(d_q.mul_(scale))
        return None, None, None, d_q_UnD, d_k_kND, d_v_kND, *d_chain


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What scores and sums are held in: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """Batched product in the dtype of b: queries, keys and values are in the dtype of computation, scores wider."""
    return a.to(b.dtype) @ b


def _by_key_head(x_BnD: Tensor, kv_heads: int) -> Tensor:
    """[k, g, B, D]: queries that share a key head lie side by side."""
    count, heads, width = x_BnD.shape
    return x_BnD.view(count, kv_heads, heads // kv_heads, width).permute(1, 2, 0, 3).contiguous()


def _by_query(x_kgBD: Tensor) -> Tensor:
    """[B, n, D], the way back."""
    return x_kgBD.permute(2, 0, 1, 3).flatten(1, 2)


def _softmax(q_kgBD: Tensor, k_kND: Tensor, block: Block, window: int | None) -> tuple[Tensor, Tensor]:
    """Probabilities [k, g * B, K] over the block's step-0 keys, and their log-sum-exp [k, g, B]."""
    keys = block.keys
    scores = _mm(q_kgBD.flatten(1, 2), k_kND[:, keys].transpose(1, 2))
    scores = scores.to(_wide(scores.dtype))
    places = torch.arange(keys.start + block.shared, keys.stop, device=scores.device)
    hidden = places > block.own_B1
    if window is not None:
        hidden |= places <= block.own_B1 - window
    scores.view(*q_kgBD.shape[:3], -1)[..., block.shared :].masked_fill_(hidden, float("-inf"))
    top = scores.amax(-1)
    p = scores.softmax(-1)
    # The largest probability is exp(top - lse): cheaper than a second pass of exponentials.
    return p, (top - p.amax(-1).log()).view(q_kgBD.shape[:3])


def _own(chain: Sequence[Tensor], block: Block) -> list[Tensor]:
    """Each step's own key (or value) of the block's queries, [k, 1, B, D]."""
    return [take(x, index).permute(1, 0, 2)[:, None] for x, index in zip(chain, block.chain, strict=True)]


def _own_scores(q_kgBD: Tensor, k_k1BD: Tensor) -> Tensor:
    """[k, g, B]."""
    return (q_kgBD * k_k1BD).sum(-1, dtype=_wide(q_kgBD.dtype))


def _add_own(total: Tensor, places: Index, part_kgBD: Tensor) -> None:
    """Add a block's gradient of chain keys (or values) of one step to that step's [U_j, k, D]."""
    add_to(total, places, part_kgBD.sum(1).permute(1, 0, 2).to(total.dtype))
