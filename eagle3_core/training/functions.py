"""Norm and MLP with hand-written backward passes that keep little: of a norm its input, of an MLP gate and up.

R rows, H hidden, I intermediate.
"""

from typing import Any

import torch
from torch import Tensor


def rms_norm(x_RH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight, [R, H] in the dtype of x; the mean square is taken in float32 at least."""
    return _RMSNorm.apply(x_RH, weight_H, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        x = x_RH.to(torch.promote_types(x_RH.dtype, torch.float32))
        norm_R1 = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale_R1 = (norm_R1.square_().div_(x.shape[-1]).add_(eps)).rsqrt_()
        ctx.save_for_backward(x_RH, weight_H, scale_R1)
        return (x * scale_R1).mul_(weight_H).to(x_RH.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_RH, weight_H, scale_R1 = ctx.saved_tensors
        unit = x_RH * scale_R1
        d_out = grads[0].to(unit.dtype)
        d_weight_H = (d_out * unit).sum(0) if ctx.needs_input_grad[1] else None
        d_x = None
        if ctx.needs_input_grad[0]:
            d_unit = d_out * weight_H
            mean_R1 = torch.linalg.vecdot(d_unit, unit)[:, None].div_(unit.shape[-1])
            d_x = d_unit.sub_(unit.mul_(mean_R1)).mul_(scale_R1).to(x_RH.dtype)
        return d_x, d_weight_H, None


def gated_mlp(residual_RH: Tensor, x_RH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor) -> Tensor:
    """residual + down(silu(gate(x)) * up(x)), [R, H]."""
    return _GatedMLP.apply(residual_RH, x_RH, gate_IH, up_IH, down_HI)


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, residual_RH: Tensor, x_RH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor
    ) -> Tensor:
        gate_RI, up_RI = x_RH @ gate_IH.T, x_RH @ up_IH.T
        ctx.save_for_backward(x_RH, gate_RI, up_RI, gate_IH, up_IH, down_HI)
        return torch.addmm(residual_RH, torch.nn.functional.silu(gate_RI).mul_(up_RI), down_HI.T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_RH, gate_RI, up_RI, gate_IH, up_IH, down_HI = ctx.saved_tensors
        d_out = grads[0]
        active = torch.nn.functional.silu(gate_RI)
        d_down = d_out.T @ (active * up_RI)
        d_product = d_out @ down_HI
        d_up = active.mul_(d_product)
        d_gate = torch.ops.aten.silu_backward(d_product.mul_(up_RI), gate_RI)
        d_x = torch.addmm(d_gate @ gate_IH, d_up, up_IH)
        return d_out, d_x, d_gate.T @ x_RH, d_up.T @ x_RH, d_down
