"""Acceptance length from hidden states alone, by a renewal walk over the verifier's own greedy text.

Drafts are made from every row at once, as training does; then only the rows a server would draft from are counted:
the first round starts at the row of the last prompt token, the next one at row t + accepted + 1. An average over all
rows would overestimate, since rows behind an accepted run are easier and a server skips them.

T tokens of prompt and text, A aux states, H hidden.
"""

import torch
from torch import Tensor

from eagle3_core.evaluation.rounds import RoundCounts
from eagle3_core.model.drafter import DrafterKeys, Eagle3Drafter


def draft_all_rows(
    drafter: Eagle3Drafter, token_ids_T: Tensor, aux_TAH: Tensor, first_row: int, speculative_tokens: int
) -> Tensor:
    """The draft tokens each row would propose.

    Args:
        drafter: the model.
        token_ids_T: int64 [T].
        aux_TAH: float [T, A, H].
        first_row: rows before this one are context only.
        speculative_tokens: k, tokens drafted a row.

    Returns:
        int64 [T - 1 - first_row, k], verifier token ids.
    """
    count = len(token_ids_T) - 1
    rows_R = torch.arange(count, device=token_ids_T.device)
    keys = DrafterKeys(len(drafter.layers))
    to_target_D = drafter.draft_to_target()
    out = drafter.step(token_ids_T[1:], drafter.fuse(aux_TAH[:count]), rows_R, 0, keys)[first_row:]
    rows_R = rows_R[first_row:]
    drafted = [to_target_D[drafter.logits(out).argmax(-1)]]
    for step in range(1, speculative_tokens):
        out = drafter.step(drafted[-1], drafter.carry(out), rows_R, step, keys)
        drafted.append(to_target_D[drafter.logits(out).argmax(-1)])
    return torch.stack(drafted, dim=1)


@torch.inference_mode()
def walk(
    drafter: Eagle3Drafter, token_ids_T: Tensor, prompt_length: int, aux_TAH: Tensor, speculative_tokens: int
) -> RoundCounts:
    """Count the rounds a server would need for this text.

    Args:
        drafter: the model.
        token_ids_T: int64 [T], the prompt and the verifier's own greedy continuation.
        prompt_length: tokens of the prompt; prefill yields the token behind it.
        aux_TAH: float [T, A, H]; the last row is not looked at.
        speculative_tokens: k, draft tokens a round.
    """
    first = prompt_length - 1
    drafted = draft_all_rows(drafter, token_ids_T, aux_TAH, first, speculative_tokens).tolist()
    tokens = token_ids_T.tolist()
    counts = RoundCounts(speculative_tokens)
    row = first
    # Token row + 1 is out already; a round is due while one behind it is missing.
    while row + 2 < len(tokens):
        truth = tokens[row + 2 : row + 2 + speculative_tokens]
        accepted = 0
        while accepted < len(truth) and drafted[row - first][accepted] == truth[accepted]:
            accepted += 1
        counts.add_round(accepted)
        row += accepted + 1
    return counts
