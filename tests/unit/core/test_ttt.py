"""Training-time test: which rows count, and what they are scored on."""

import torch

from eagle3_core.contract.drafter_config import DrafterConfig
from eagle3_core.model.drafter import DrafterKeys, Eagle3Drafter
from eagle3_core.training.ttt import counted_rows, score_sequence, total_loss
from tests import tiny


def small_drafter(seed: int = 0, **changes: object) -> Eagle3Drafter:
    torch.manual_seed(seed)
    config = DrafterConfig(
        **{
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 4,
            "vocab_size": 40,
            "draft_vocab_size": 40,
            "aux_layer_ids": tiny.AUX_LAYER_IDS,
            "rope": {"rope_type": "default", "rope_theta": 10000.0},
            **changes,
        }
    )
    return Eagle3Drafter(config)


def test_the_rows_of_an_answer_are_those_a_server_drafts_from() -> None:
    # The answer is tokens 5..9: prefill yields 5, rounds draft 6..9, so row 4 is the first and row 7 the last.
    mask = torch.zeros(12, dtype=torch.bool)
    mask[5:10] = True
    rows = counted_rows(mask, 3)
    assert [step.nonzero()[:, 0].tolist() for step in rows] == [[4, 5, 6, 7], [4, 5, 6], [4, 5]]


def test_two_answers_do_not_run_into_each_other() -> None:
    mask = torch.tensor([0, 1, 1, 1, 0, 1, 1, 0], dtype=torch.bool)
    rows = counted_rows(mask, 2)
    assert [step.nonzero()[:, 0].tolist() for step in rows] == [[0, 1, 4], [0]]


def test_an_answer_at_the_very_end_counts_up_to_the_last_token() -> None:
    mask = torch.tensor([0, 0, 1, 1, 1], dtype=torch.bool)
    assert counted_rows(mask, 2).tolist() == [[False, True, True, False], [False, True, False, False]]


def test_a_row_is_scored_on_the_verifiers_word_about_the_token_it_predicts() -> None:
    drafter = small_drafter()
    ids = torch.randint(0, 40, (9,))
    last = torch.eye(9, 40) * 50.0
    scored: list[torch.Tensor] = []

    def head(states: torch.Tensor) -> torch.Tensor:
        scored.append(states)
        return states

    rows = torch.zeros(2, 8, dtype=torch.bool)
    rows[0, 3] = rows[1, 3] = True
    scores = score_sequence(drafter, head, ids, torch.randn(9, 3, 16), last, rows)
    # Row 3 predicts token 5 at step 0, so state 4 speaks; token 6 at step 1, so state 5 does.
    assert scored[0].argmax(-1).tolist() == [4, 5]
    assert [score.rows for score in scores] == [1, 1]


def test_the_loss_is_divided_by_each_steps_own_rows() -> None:
    drafter = small_drafter()
    ids, aux, last = torch.randint(0, 40, (10,)), torch.randn(10, 3, 16), torch.randn(10, 16)
    weight = torch.randn(40, 16)
    rows = counted_rows(torch.arange(10) >= 4, 3)
    scores = score_sequence(drafter, lambda states: states @ weight.T, ids, aux, last, rows)
    assert [score.rows for score in scores] == [5, 4, 3]
    expected = sum(0.5**k * float(score.loss_sum.detach()) / (5 - k) for k, score in enumerate(scores))
    assert abs(float(total_loss(scores, 0.5).detach()) - expected) < 1e-5


def test_a_later_step_sees_no_later_token() -> None:
    """What stands behind the tokens a row has joined must not change what it says."""
    drafter = small_drafter()
    ids, aux = torch.randint(0, 40, (10,)), torch.randn(10, 3, 16)

    def says(ids: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
        keys = DrafterKeys(1)
        rows = torch.arange(6)
        first = drafter.step(ids[1:7], drafter.fuse(aux[:6]), rows, 0, keys)
        second = drafter.step(ids[2:8], drafter.carry(first), rows, 1, keys)
        return drafter.logits(second)[3]

    changed_ids, changed_aux = ids.clone(), aux.clone()
    changed_ids[6:] = (changed_ids[6:] + 1) % 40
    changed_aux[4:] += 1.0
    assert torch.equal(says(ids, aux), says(changed_ids, changed_aux))
    changed_aux[3] += 1.0
    assert not torch.equal(says(ids, aux), says(ids, changed_aux))


def test_more_steps_than_tokens_are_scored_as_far_as_there_are_any() -> None:
    drafter = small_drafter()
    rows = counted_rows(torch.tensor([False, True, True, True]), 9)
    head = torch.randn(40, 16)
    aux, last = torch.randn(4, 3, 16), torch.randn(4, 16)
    scores = score_sequence(drafter, lambda h: h @ head.T, torch.arange(4), aux, last, rows)
    assert [score.rows for score in scores] == [2, 1, *[0] * 7]
    assert torch.isfinite(total_loss(scores, 1.0))
