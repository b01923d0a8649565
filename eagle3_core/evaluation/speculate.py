"""Real greedy decoding with a verifier, plain and speculative; both give the same text.

A aux states, H hidden, n tokens of one call.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eagle3_core.evaluation.rounds import RoundCounts
from eagle3_core.model.drafter import DrafterKeys, Eagle3Drafter


class VerifierSession(Protocol):
    """One text in the making, its keys and values cached."""

    def extend(self, ids: list[int]) -> tuple[list[int], Tensor]:
        """Take tokens in; returns the greedy next token behind each, and their aux states [n, A, H]."""
        ...

    def rewind(self, count: int) -> None:
        """Forget the last tokens."""
        ...


@dataclass(frozen=True)
class GreedyText:
    """A prompt's plain greedy continuation, and the aux states [T - 1, A, H] of all tokens but the last."""

    new_ids: list[int]
    aux_TAH: Tensor


@torch.inference_mode()
def decode_greedy(session: VerifierSession, prompt: list[int], max_new_tokens: int, stop_ids: set[int]) -> GreedyText:
    """One token at a time, up to `max_new_tokens` or a stop token, which is kept."""
    greedy, aux = session.extend(prompt)
    new, states = [greedy[-1]], [aux]
    while len(new) < max_new_tokens and new[-1] not in stop_ids:
        greedy, aux = session.extend(new[-1:])
        new.append(greedy[-1])
        states.append(aux)
    return GreedyText(new, torch.cat(states))


@torch.inference_mode()
def decode_speculative(
    session: VerifierSession,
    drafter: Eagle3Drafter,
    prompt: list[int],
    max_new_tokens: int,
    stop_ids: set[int],
    speculative_tokens: int,
) -> tuple[list[int], RoundCounts]:
    """Draft a chain, verify it in one pass, keep the agreeing start and the verifier's own next token.

    Args:
        session: a fresh session of the verifier.
        drafter: the model.
        prompt: token ids.
        max_new_tokens: where the text is cut; draft tokens behind the cut are not counted as accepted.
        stop_ids: tokens that end the text.
        speculative_tokens: k, draft tokens a round.

    Returns:
        The new tokens, and the rounds it took.
    """
    device = drafter.fc.weight.device
    keys = DrafterKeys(len(drafter.layers))
    counts = RoundCounts(speculative_tokens)
    greedy, aux = session.extend(prompt)
    new = [greedy[-1]]
    joined = [*prompt[1:], new[-1]]
    while len(new) < max_new_tokens and new[-1] not in stop_ids:
        draft = _draft_chain(drafter, torch.tensor(joined, device=device), aux, keys, speculative_tokens)
        greedy, aux = session.extend([new[-1], *draft])
        accepted = 0
        while accepted < speculative_tokens and draft[accepted] == greedy[accepted]:
            accepted += 1
        session.rewind(speculative_tokens - accepted)
        joined, aux = greedy[: accepted + 1], aux[: accepted + 1]
        kept = _cut(joined, max_new_tokens - len(new), stop_ids)
        counts.add_round(min(accepted, len(kept)))
        new += kept
    return new, counts


def _cut(ids: list[int], room: int, stop_ids: set[int]) -> list[int]:
    """The tokens that still belong to the text."""
    stop = next((index for index, token in enumerate(ids) if token in stop_ids), len(ids))
    return ids[: min(room, stop + 1)]


def _draft_chain(
    drafter: Eagle3Drafter, joined_n: Tensor, aux_nAH: Tensor, keys: DrafterKeys, speculative_tokens: int
) -> list[int]:
    """Confirm the rows of the verified tokens, then draft a chain from the last of them."""
    rows = torch.arange(keys.rows, keys.rows + len(joined_n), device=joined_n.device)
    to_target_D = drafter.draft_to_target()
    out = drafter.step(joined_n, drafter.fuse(aux_nAH), rows, 0, keys)[-1:]
    row = rows[-1:]
    drafted = [int(to_target_D[drafter.logits(out).argmax(-1)])]
    for step in range(1, speculative_tokens):
        ids = torch.tensor(drafted[-1:], device=joined_n.device)
        out = drafter.step(ids, drafter.carry(out), row, step, keys)
        drafted.append(int(to_target_D[drafter.logits(out).argmax(-1)]))
    keys.drop_chain()
    return drafted
