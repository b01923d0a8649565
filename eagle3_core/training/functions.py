"""The parts of a layer with hand-written backward passes: they keep little, and sum a weight's gradient in place.

A weight is used at every TTT step. autograd would make one gradient of its full size a step and add them up; here each
use adds its product straight into one buffer (`WeightSum`), and `collect`, whose backward pass runs after all that
follows it, hands the sums over. Norms are computed anew in the backward pass: of a norm only its input is kept.

R rows, H hidden, I intermediate, O outputs.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3_core.training.rows import Index, add_to, take

Gradients = tuple[Tensor | None, ...]


class WeightSum:
    """A weight [O, H] and, in a backward pass, the gradient its uses have summed so far."""

    def __init__(self, weight_OH: Tensor) -> None:
        self.source = weight_OH
        self.value = weight_OH.detach()
        self.grad: Tensor | None = None

    def add(self, d_out_RO: Tensor, x_RH: Tensor) -> None:
        """Count in one use, out = x W^T."""
        if self.grad is None:
            self.grad = d_out_RO.T @ x_RH
        else:
            self.grad.addmm_(d_out_RO.T, x_RH)


def collect(x: Tensor, weights: Sequence[WeightSum]) -> Tensor:
    """x, from which every use of the weights must follow; its backward pass gives them their gradients."""
    return _Collect.apply(weights, x, *(weight.source for weight in weights))


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Sequence[WeightSum], x: Tensor, *sources: Tensor) -> Tensor:
        ctx.weights = weights
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        sums = [weight.grad for weight in ctx.weights]
        for weight in ctx.weights:
            weight.grad = None
        return None, grads[0], *sums


def rms_norm(x_RH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight, [R, H] in the dtype of x; the mean square is taken in float32 at least."""
    return _RMSNorm.apply(x_RH, weight_H, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        out, scale_R1 = _norm(x_RH, weight_H, eps)
        ctx.save_for_backward(x_RH, weight_H, scale_R1)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        x_RH, weight_H, scale_R1 = ctx.saved_tensors
        return *_norm_backward(grads[0], x_RH, weight_H, scale_R1, ctx.needs_input_grad[0]), None


def _norm(x_RH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm, and 1 / rms [R, 1]."""
    wide = x_RH.to(torch.promote_types(x_RH.dtype, torch.float32))
    square_R1 = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
    scale_R1 = square_R1.div_(wide.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale_R1).mul_(weight_H).to(x_RH.dtype), scale_R1


def _normed(x_RH: Tensor, weight_H: Tensor, scale_R1: Tensor) -> Tensor:
    """The norm again, from what is kept."""
    return (x_RH * scale_R1).mul_(weight_H).to(x_RH.dtype)


def _norm_backward(
    d_out_RH: Tensor, x_RH: Tensor, weight_H: Tensor, scale_R1: Tensor, wanted: bool = True
) -> tuple[Tensor | None, Tensor]:
    """Gradients of x and weight."""
    unit = x_RH * scale_R1
    d_out = d_out_RH.to(unit.dtype)
    d_weight_H = (d_out * unit).sum(0)
    if not wanted:
        return None, d_weight_H
    d_unit = d_out * weight_H
    mean_R1 = torch.linalg.vecdot(d_unit, unit)[:, None].div_(unit.shape[-1])
    return d_unit.sub_(unit.mul_(mean_R1)).mul_(scale_R1).to(x_RH.dtype), d_weight_H


def normed_projections(
    x_RH: Tensor,
    norm_H: Tensor,
    eps: float,
    weights: Sequence[WeightSum],
    places: Sequence[Index],
    added: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    """For each weight, norm(x)[places] W^T + added, [r, O]; `added` is [r, O], [O] or None."""
    return _Projections.apply(x_RH, norm_H, eps, weights, places, *added)


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RH: Tensor,
        norm_H: Tensor,
        eps: float,
        weights: Sequence[WeightSum],
        places: Sequence[Index],
        *added: Tensor | None,
    ) -> tuple[Tensor, ...]:
        normed_RH, scale_R1 = _norm(x_RH, norm_H, eps)
        ctx.weights, ctx.places, ctx.vectors = weights, places, [a is not None and a.dim() == 1 for a in added]
        ctx.save_for_backward(x_RH, norm_H, scale_R1)
        out = []
        for weight, index, extra in zip(weights, places, added, strict=True):
            rows = take(normed_RH, index)
            out.append(rows @ weight.value.T if extra is None else torch.addmm(extra, rows, weight.value.T))
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        x_RH, norm_H, scale_R1 = ctx.saved_tensors
        normed_RH = _normed(x_RH, norm_H, scale_R1)
        d_normed_RH = torch.zeros_like(normed_RH)
        d_added = []
        for weight, index, d_out, vector, wanted in zip(
            ctx.weights, ctx.places, grads, ctx.vectors, ctx.needs_input_grad[5:], strict=True
        ):
            weight.add(d_out, take(normed_RH, index))
            if isinstance(index, slice):
                d_normed_RH[index].addmm_(d_out, weight.value)
            else:
                add_to(d_normed_RH, index, d_out @ weight.value)
            d_added.append((d_out.sum(0) if vector else d_out) if wanted else None)
        d_x, d_norm_H = _norm_backward(d_normed_RH, x_RH, norm_H, scale_R1)
        return d_x, d_norm_H, None, None, None, *d_added


def residual_linear(residual_RH: Tensor, x_RO: Tensor, weight: WeightSum) -> Tensor:
    """residual + x W^T, [R, H]."""
    return _ResidualLinear.apply(residual_RH, x_RO, weight)


class _ResidualLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, residual_RH: Tensor, x_RO: Tensor, weight: WeightSum) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(x_RO)
        return torch.addmm(residual_RH, x_RO, weight.value.T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        ctx.weight.add(grads[0], ctx.saved_tensors[0])
        return grads[0], grads[0] @ ctx.weight.value, None


def gated_mlp(x_RH: Tensor, norm_H: Tensor, eps: float, gate: WeightSum, up: WeightSum, down: WeightSum) -> Tensor:
    """x + down(silu(gate(n)) * up(n)), n = norm(x); [R, H]."""
    return _GatedMLP.apply(x_RH, norm_H, eps, gate, up, down)


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RH: Tensor, norm_H: Tensor, eps: float, gate: WeightSum, up: WeightSum, down: WeightSum
    ) -> Tensor:
        normed_RH, scale_R1 = _norm(x_RH, norm_H, eps)
        gate_RI, up_RI = normed_RH @ gate.value.T, normed_RH @ up.value.T
        ctx.weights = gate, up, down
        ctx.save_for_backward(x_RH, norm_H, scale_R1)
        # Seen by nobody else, and so used up in the backward pass.
        ctx.kept = gate_RI, up_RI
        return torch.addmm(x_RH, F.silu(gate_RI).mul_(up_RI), down.value.T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        x_RH, norm_H, scale_R1 = ctx.saved_tensors
        gate, up, down = ctx.weights
        gate_RI, up_RI = ctx.kept
        del ctx.kept
        d_out = grads[0]
        active = F.silu(gate_RI)
        d_product = active * up_RI
        down.add(d_out, d_product)
        torch.mm(d_out, down.value, out=d_product)
        d_up = active.mul_(d_product)
        d_gate = torch.ops.aten.silu_backward.grad_input(d_product.mul_(up_RI), gate_RI, grad_input=up_RI)
        del d_product, gate_RI, up_RI
        normed_RH = _normed(x_RH, norm_H, scale_R1)
        gate.add(d_gate, normed_RH)
        up.add(d_up, normed_RH)
        d_normed = torch.addmm(torch.mm(d_gate, gate.value, out=normed_RH), d_up, up.value)
        d_x, d_norm_H = _norm_backward(d_normed, x_RH, norm_H, scale_R1)
        assert d_x is not None
        return d_x.add_(d_out), d_norm_H, None, None, None, None
