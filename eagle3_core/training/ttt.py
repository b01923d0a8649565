"""Training-time test: unroll the drafter over one sequence and score every step against the verifier.

Alignment (the one place that states it): row t joins the embedding of token t+1 with the states of token t. At TTT
step k it predicts token t+2+k, so its target is the verifier's distribution at token t+1+k. The row counts at step k
when tokens t+1 .. t+2+k are all supervised and in the document: the rows a server drafts. The sets are nested.

T tokens of a sequence, R = T - 1 rows, A aux states, H hidden, D draft vocabulary, K TTT steps.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3_core.model.drafter import DrafterKeys, Eagle3Drafter


def counted_rows(loss_mask_T: Tensor, ttt_steps: int) -> Tensor:
    """Which rows count at each step.

    Args:
        loss_mask_T: bool [T], true where the token is supervised.
        ttt_steps: K.

    Returns:
        bool [K, T - 1]; row k is a subset of row k - 1.
    """
    length = len(loss_mask_T)
    padded = torch.cat((loss_mask_T, loss_mask_T.new_zeros(ttt_steps + 1)))
    counted = padded[1:length].clone()
    steps = []
    for step in range(ttt_steps):
        counted = counted & padded[2 + step : length + 1 + step]
        steps.append(counted)
    return torch.stack(steps)


@dataclass(frozen=True)
class StepScore:
    """One TTT step of one sequence: sums over its counted rows, so that sequences can be added up."""

    loss_sum: Tensor
    """float32 scalar, sum of KL(verifier || drafter) in nats."""
    correct: Tensor
    """int64 scalar, rows where the drafter's first choice is the verifier's."""
    rows: int


TargetHead = Callable[[Tensor], Tensor]
"""Pre-norm or post-norm last states [R, H] -> verifier logits over the draft vocabulary, float32 [R, D]."""


def score_sequence(
    drafter: Eagle3Drafter,
    target_head: TargetHead,
    token_ids_T: Tensor,
    aux_TAH: Tensor,
    last_TH: Tensor,
    rows_KR: Tensor,
) -> list[StepScore]:
    """Unroll the drafter and score each step on its counted rows.

    Args:
        drafter: the model; gradients flow into it.
        target_head: gives the verifier's logits over the draft vocabulary.
        token_ids_T: int64 [T].
        aux_TAH: [T, A, H] aux states, noise already added.
        last_TH: [T, H] the verifier's last states.
        rows_KR: bool [K, T - 1], the rows that count at each step. At step k rows from T - 1 - k on have no
            target and must not be set.

    Returns:
        K scores; a step without counted rows has a loss sum of zero.
    """
    count = len(token_ids_T) - 1
    steps = rows_KR.shape[0]
    rows_R = torch.arange(count, device=token_ids_T.device)
    # Behind the end the input token is 0: such a row never counts, but its place has to be filled.
    ids = torch.cat((token_ids_T[1:], token_ids_T.new_zeros(steps)))
    needed = torch.zeros(count + 1, dtype=torch.bool, device=rows_KR.device)
    for step in range(min(steps, count)):
        needed[1 + step :] |= rows_KR[step, : count - step]
    target_row = needed.cumsum(0) - 1
    target_logp = target_head(last_TH[needed]).log_softmax(-1)
    target_best = target_logp.argmax(-1)
    target_p = target_logp.exp()

    keys = DrafterKeys(len(drafter.layers))
    h = drafter.fuse(aux_TAH[:count])
    scores = []
    for step in range(steps):
        out = drafter.step(ids[step : step + count], h, rows_R, step, keys)
        chosen = rows_KR[step].nonzero()[:, 0]
        which = target_row[chosen + 1 + step]
        logits = drafter.logits(out[chosen])
        logq = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        divergence = torch.nn.functional.kl_div(logq, target_p[which], reduction="sum")
        correct = (logq.argmax(-1) == target_best[which]).sum()
        scores.append(StepScore(divergence, correct, len(chosen)))
        h = drafter.carry(out)
    return scores


def total_loss(scores: list[StepScore], decay: float) -> Tensor:
    """Sum over steps of decay**k times the mean over that step's own rows; steps without rows add nothing."""
    losses = [decay**k * score.loss_sum / score.rows for k, score in enumerate(scores) if score.rows]
    assert losses, "a sequence without counted rows never gets here"
    return torch.stack(losses).sum()
