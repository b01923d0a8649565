"""Training-time test written down plainly: all rows, whole scores, autograd. What the engine is held against."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle3_core.model.drafter import DrafterKeys, Eagle3Drafter
from eagle3_core.training.engine import Document
from eagle3_core.training.losses import Loss, forward_kl
from eagle3_core.training.score import StepScore, TargetHead


def plain_scores(
    drafter: Eagle3Drafter, target_head: TargetHead, document: Document, loss: Loss = forward_kl
) -> list[StepScore]:
    """Unroll over one document and score each step on its counted rows; gradients flow from the sums."""
    count = len(document.token_ids_T) - 1
    rows_R = torch.arange(count)
    steps = document.rows_KR.shape[0]
    # Behind the end the input token is 0: such a row never counts, but its place has to be filled.
    ids = torch.cat((document.token_ids_T[1:], document.token_ids_T.new_zeros(steps)))
    logp = target_head(document.last_TH).log_softmax(-1)
    keys = DrafterKeys(len(drafter.layers))
    h = drafter.fuse(document.aux_TAH[:count])
    scores = []
    for step in range(steps):
        out = drafter.step(ids[step : step + count], h, rows_R, step, keys)
        chosen = document.rows_KR[step].nonzero()[:, 0]
        wanted = logp[chosen + 1 + step]
        logq = drafter.logits(out[chosen]).log_softmax(-1)
        correct = (logq.argmax(-1) == wanted.argmax(-1)).sum()
        scores.append(StepScore(loss(wanted, logq).sum(), correct, len(chosen)))
        h = drafter.carry(out)
    return scores


def plain_loss(
    drafter: Eagle3Drafter,
    target_head: TargetHead,
    documents: Sequence[Document],
    weights: Sequence[float],
    loss: Loss = forward_kl,
) -> Tensor:
    """Sum over documents and steps of the step's weight times its loss."""
    each = [plain_scores(drafter, target_head, document, loss) for document in documents if document.rows_KR.any()]
    terms = [weight * step.loss_sum for scores in each for weight, step in zip(weights, scores, strict=True)]
    return torch.stack(terms).sum()
