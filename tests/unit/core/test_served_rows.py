"""The rows that are trained are those a server drafts from: recorded while decoding, compared with the loss mask."""

import torch
from torch import Tensor

from eagle3_core.evaluation.speculate import decode_greedy, decode_speculative
from eagle3_core.model.drafter import DrafterKeys, Eagle3Drafter
from eagle3_core.training.rows import plan_rows
from eagle3_core.training.ttt import counted_rows
from tests.unit.core.test_evaluation import RuleVerifier
from tests.unit.core.test_ttt import small_drafter

STEPS = 3
Drafted = set[tuple[int, int]]
"""(row, TTT step) of every token drafted."""


class Recorder(Eagle3Drafter):
    """Notes what it drafts, and is always wrong, so that a round starts at every row there is."""

    drafted: Drafted

    def step(self, ids_R: Tensor, h_RH: Tensor, rows_R: Tensor, step: int, keys: DrafterKeys) -> Tensor:
        self.drafted.add((int(rows_R[-1]), step))
        return super().step(ids_R, h_RH, rows_R, step, keys)

    def draft_to_target(self) -> Tensor:
        return torch.full((self.config.draft_vocab_size,), -1)


class NeverAgrees(RuleVerifier):
    """Takes the impossible token as 0."""

    def extend(self, ids: list[int]) -> tuple[list[int], Tensor]:
        return super().extend([max(0, token) for token in ids])


def chat(turns: list[tuple[int, int]]) -> tuple[list[int], Tensor, Drafted]:
    """A chat of (prompt tokens, answer tokens) a turn: its tokens, loss mask, and what serving its answers drafted."""
    recorder = Recorder(small_drafter(draft_vocab_size=4).config)
    recorder.embed_tokens.register_forward_pre_hook(lambda _, args: (args[0].clamp(min=0),))
    recorder.drafted = set()
    ids: list[int] = []
    supervised: list[bool] = []
    served: Drafted = set()
    for prompt, answer in turns:
        ids += [len(ids) % 40 for _ in range(prompt)]
        supervised += [False] * prompt
        text = decode_greedy(RuleVerifier(), ids, answer, set()).new_ids
        recorder.drafted = set()
        again, counts = decode_speculative(NeverAgrees(), recorder, ids, answer, set(), STEPS)
        assert (again, counts.rounds) == (text, answer - 1), "a round for every token but the first"
        # A draft behind the answer's end is thrown away whatever it says.
        served |= {(row, step) for row, step in recorder.drafted if row + 2 + step < len(ids) + answer}
        ids += text
        supervised += [True] * answer
    return ids, torch.tensor(supervised), served


def trained(masks: list[Tensor]) -> list[Drafted]:
    """What the engine scores of each document of a pack."""
    plan = plan_rows([counted_rows(mask, STEPS) for mask in masks])
    starts = torch.tensor([0, *plan.key_rows]).cumsum(0)
    found: list[Drafted] = [set() for _ in masks]
    for step, rows in enumerate(plan.steps):
        every = torch.arange(len(rows.keys_U))
        counted = torch.cat([every[part.rows] for part in rows.parts if part is not None])
        for place, position in zip(rows.keys_U[counted], rows.positions_U[counted], strict=True):
            number = int(torch.searchsorted(starts, place, right=True)) - 1
            assert int(position) - step == int(place - starts[number]), "positions start anew in each document"
            found[number].add((int(position) - step, step))
    return found


def test_one_answer() -> None:
    _, mask, served = chat([(5, 5)])
    # Tokens 5 .. 9: prefill yields 5, so row 4 drafts 6 first, and row 7 drafts 9 last.
    assert sorted(row for row, step in served if step == 0) == [4, 5, 6, 7]
    assert trained([mask]) == [served]


def test_every_answer_of_a_chat_first_and_last_tokens_included() -> None:
    ids, mask, served = chat([(5, 6), (3, 4), (2, 1), (4, 9)])
    assert trained([mask]) == [served]
    ends = [t for t in range(len(ids)) if mask[t] and (t + 1 == len(ids) or not mask[t + 1])]
    starts = [t for t in range(len(ids)) if mask[t] and not mask[t - 1]]
    assert all(((start - 1, 0) in served) == (start != end) for start, end in zip(starts, ends, strict=True))
    assert all(((end - 2, 0) in served) == (start != end) for start, end in zip(starts, ends, strict=True))


def test_documents_of_a_pack() -> None:
    chats = [chat([(5, 6), (3, 4)]), chat([(1, 8)]), chat([(2, 2), (2, 7)])]
    assert trained([mask for _, mask, _ in chats]) == [served for *_, served in chats]
