"""Training-time test: which rows count.

Alignment (the one place that states it): row t joins the embedding of token t+1 with the states of token t. At TTT
step k it predicts token t+2+k, so its target is the verifier's distribution at token t+1+k. The row counts at step k
when tokens t+1 .. t+2+k are all supervised and in the document: the rows a server drafts. The sets are nested.

T tokens of a document, T - 1 rows, K TTT steps.
"""

import torch
from torch import Tensor


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
