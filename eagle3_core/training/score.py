"""Head and loss of all TTT steps at once, a chunk of targets at a time: loss and gradient in one go.

    for each chunk of targets:                     verifier head -> log p [C, D], once a target
        for each step: rows scored on this chunk   drafter head -> z [c, D] -> loss, d z -> d h [c, H], d W [D, H]

So nothing of size D is held for more than one chunk, forward or backward. A target serves one row of each step.

C targets (of a chunk), c rows of one step on them, U rows of a step, H hidden, D draft vocabulary, K steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3_core.training.losses import Loss
from eagle3_core.training.rows import Index, Plan, add_to, take

TargetHead = Callable[[Tensor], Tensor]
"""The verifier's last states [C, H] -> its logits over the draft vocabulary, [C, D], float32 at least."""


@dataclass(frozen=True)
class StepScore:
    """One TTT step: sums over its counted rows, so that packs can be added up."""

    loss_sum: Tensor
    """float32 scalar, nats (for `tv` a share)."""
    correct: Tensor
    """int64 scalar, rows where the drafter's first choice is the verifier's."""
    rows: int


def score(
    states: Sequence[Tensor],
    head_DH: Tensor,
    last_CH: Tensor,
    target_head: TargetHead,
    plan: Plan,
    weights: Sequence[float],
    loss: Loss | None,
) -> tuple[Tensor, list[StepScore]]:
    """The loss of a pack, and each step's score.

    Args:
        states: of each step, [U, H] behind the final norm.
        head_DH: the drafter's head; its gradient is computed when it asks for one.
        last_CH: the verifier's last states of the targets.
        target_head: gives the verifier's logits.
        plan: which of the states are scored, and on which target.
        weights: what a row's loss counts at each step, also of steps beyond those that have states.
        loss: see `losses`; None: forward KL.

    Returns:
        Sum over steps of weight times loss, a scalar that gradients flow from; and the scores, without gradients.
    """
    context = _Context(last_CH, target_head, plan, weights[: len(states)], loss)
    total, sums_K, correct_K = _Score.apply(context, head_DH, *states)
    counts = [step.count for step in plan.steps]
    return total, [StepScore(*parts) for parts in zip(sums_K, correct_K, counts, strict=True)]


@dataclass(frozen=True)
class _Context:
    last_CH: Tensor
    target_head: TargetHead
    plan: Plan
    weights: Sequence[float]
    loss: Loss | None


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: _Context, head_DH: Tensor, *states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wanted = any(ctx.needs_input_grad)
        d_states = [torch.zeros_like(state) if wanted else None for state in states]
        d_head_DH = torch.zeros_like(head_DH) if ctx.needs_input_grad[1] else None
        sums = torch.zeros(len(states), dtype=torch.promote_types(head_DH.dtype, torch.float32), device=head_DH.device)
        correct = torch.zeros(len(states), dtype=torch.int64, device=head_DH.device)
        for number, chunk in enumerate(given.plan.chunks):
            target = _Target.of(given.target_head(given.last_CH[chunk]), given.loss is not None)
            for step, (state, rows, d_state) in enumerate(zip(states, given.plan.steps, d_states, strict=True)):
                part = rows.parts[number]
                if part is None:
                    continue
                h = take(state, part.rows)
                loss, right, d_z = _score_rows(h @ head_DH.T, target.rows(part.targets), given.loss, wanted)
                sums[step] += loss
                correct[step] += right
                if d_state is not None and d_z is not None:
                    d_z = d_z.mul_(given.weights[step]).to(head_DH.dtype)
                    add_to(d_state, part.rows, d_z @ head_DH)
                    if d_head_DH is not None:
                        d_head_DH.addmm_(d_z.T, h)
        ctx.grads = (d_head_DH, *d_states)
        ctx.mark_non_differentiable(sums, correct)
        total = (sums * sums.new_tensor(given.weights)).sum()
        return total, sums, correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if grad is None else grad.mul_(grads[0].to(grad.dtype)) for grad in ctx.grads]
        del ctx.grads
        return None, *scaled


@dataclass(frozen=True)
class _Target:
    """The verifier's word on some rows: p [C, D], its first choice [C], sum p log p [C]; log p where asked for."""

    p_CD: Tensor
    best_C: Tensor
    negentropy_C: Tensor
    logp_CD: Tensor | None

    @classmethod
    def of(cls, logits_CD: Tensor, with_log: bool) -> "_Target":
        best_C = logits_CD.argmax(-1)
        p = logits_CD.softmax(-1)
        lse_C = _log_sum_exp(logits_CD.gather(1, best_C[:, None])[:, 0], p)
        logp = logits_CD - lse_C[:, None] if with_log else None
        return cls(p, best_C, torch.linalg.vecdot(p, logits_CD) - lse_C, logp)

    def rows(self, on: Index) -> "_Target":
        """Those of some rows."""
        logp = None if self.logp_CD is None else take(self.logp_CD, on)
        return _Target(take(self.p_CD, on), take(self.best_C, on), take(self.negentropy_C, on), logp)


def _log_sum_exp(top_C: Tensor, softmax_CD: Tensor) -> Tensor:
    """Of logits whose largest is `top`: the largest probability is exp(top - lse). Saves a pass of exponentials."""
    return top_C - softmax_CD.amax(-1).log()


def _score_rows(z_cD: Tensor, target: _Target, loss: Loss | None, wanted: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sum of the loss over rows, how many first choices are right, and the gradient [c, D] if wanted."""
    z_cD = z_cD.to(target.p_CD.dtype)
    top_c = z_cD.amax(-1)
    right = (z_cD.gather(1, target.best_C[:, None])[:, 0] >= top_c).sum()
    if loss is None:
        cross_c = torch.linalg.vecdot(target.p_CD, z_cD)
        q = z_cD.softmax(-1)
        total = (target.negentropy_C - cross_c + _log_sum_exp(top_c, q)).sum()
        return total, right, q.sub_(target.p_CD) if wanted else None
    assert target.logp_CD is not None
    with torch.enable_grad():
        z = z_cD.detach().requires_grad_()
        total = loss(target.logp_CD, F.log_softmax(z, -1)).sum()
    return total.detach(), right, torch.autograd.grad(total, z)[0] if wanted else None
