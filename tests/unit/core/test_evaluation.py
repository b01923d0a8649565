"""Acceptance length: the walk counts exactly the rounds that decoding makes."""

import itertools

import pytest
import torch
from torch import Tensor

from eagle3_core.evaluation.rounds import RoundCounts
from eagle3_core.evaluation.speculate import decode_greedy, decode_speculative
from eagle3_core.evaluation.walk import walk
from eagle3_core.model.drafter import Eagle3Drafter
from tests.unit.core.test_ttt import small_drafter

VOCAB, HIDDEN = 40, 16


class RuleVerifier:
    """A verifier whose next token and states follow from its last two tokens; counts its forward passes."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.passes = 0

    def extend(self, ids: list[int]) -> tuple[list[int], Tensor]:
        self.passes += 1
        start = len(self.ids)
        self.ids += ids
        greedy = [(self.ids[i] * 7 + self.ids[i - 1] + 3) % VOCAB if i else 1 for i in range(start, len(self.ids))]
        states = []
        for index in range(start, len(self.ids)):
            generator = torch.Generator().manual_seed(self.ids[index] * VOCAB + self.ids[index - 1] * bool(index))
            states.append(torch.randn(3, HIDDEN, generator=generator))
        return greedy, torch.stack(states)

    def rewind(self, count: int) -> None:
        if count:
            del self.ids[-count:]


def copying_drafter() -> Eagle3Drafter:
    """A drafter that is right now and then: its vocabulary is small, so chance does it."""
    drafter = small_drafter(seed=3, draft_vocab_size=4)
    chosen = torch.tensor([1, 11, 21, 31])
    drafter.d2t.copy_(chosen - torch.arange(4))
    drafter.t2d[chosen] = True
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(3)
    return drafter


def test_speculative_text_is_the_greedy_text_and_the_walk_counts_its_rounds() -> None:
    drafter = copying_drafter()
    walked, decoded = RoundCounts(3), RoundCounts(3)
    for start in range(24):
        prompt = [start, 5, (start * 3) % VOCAB]
        plain = decode_greedy(RuleVerifier(), prompt, 20, {39})
        session = RuleVerifier()
        text, counts = decode_speculative(session, drafter, prompt, 20, {39}, 3)
        assert text == plain.new_ids
        assert session.passes == counts.rounds + 1
        ids = torch.tensor([*prompt, *plain.new_ids])
        assert plain.aux_TAH.shape == (len(ids) - 1, 3, HIDDEN)
        this = walk(drafter, ids, len(prompt), plain.aux_TAH, 3)
        assert (this.rounds, this.per_position) == (counts.rounds, counts.per_position)
        walked.add(this)
        decoded.add(counts)
    assert walked.acceptance_length == decoded.acceptance_length
    assert decoded.per_position[0] > 0, "the drafter must be right at times, or nothing was shown"


def test_acceptance_length_counts_the_bonus_token() -> None:
    counts = RoundCounts(3)
    for accepted in (0, 3, 1):
        counts.add_round(accepted)
    assert counts.acceptance_length == 1 + 4 / 3
    assert counts.acceptance_rates == [2 / 3, 1 / 3, 1 / 3]


def test_a_text_that_ends_with_its_first_token_needs_no_round() -> None:
    session = RuleVerifier()
    first = decode_greedy(RuleVerifier(), [2, 5], 1, set()).new_ids[0]
    text, counts = decode_speculative(session, copying_drafter(), [2, 5], 20, {first}, 3)
    assert text == [first]
    assert counts.rounds == 0


@pytest.mark.parametrize("drafted", [1, 2, 5, 8])
def test_walk_and_decoding_agree_wherever_a_text_is_cut(drafted: int) -> None:
    drafter = copying_drafter()
    accepted = 0
    for start, cut, stops in itertools.product(range(4), (2, 3, 9), (set(), {11, 21})):
        prompt = [start, 5, (start * 3) % VOCAB][: 1 + start % 3]
        plain = decode_greedy(EagerVerifier(), prompt, cut, stops)
        text, counts = decode_speculative(EagerVerifier(), drafter, prompt, cut, stops, drafted)
        assert text == plain.new_ids
        walked = walk(drafter, torch.tensor([*prompt, *text]), len(prompt), plain.aux_TAH, drafted)
        assert (walked.rounds, walked.per_position) == (counts.rounds, counts.per_position)
        accepted += sum(counts.per_position)
    assert accepted > 5, "the drafter must be right at times, or nothing was shown"


class EagerVerifier(RuleVerifier):
    """Likes the tokens the drafter knows."""

    def extend(self, ids: list[int]) -> tuple[list[int], Tensor]:
        greedy, states = super().extend(ids)
        return [(1, 11, 21, 31)[token % 4] if token % 3 else token for token in greedy], states
