"""Training-time test: which rows count, and what they are scored on."""

import torch

from eagle3_core.contract.drafter_config import DrafterConfig
from eagle3_core.model.drafter import DrafterKeys, Eagle3Drafter
from eagle3_core.training.engine import Document, make_pack, score_pack
from eagle3_core.training.ttt import counted_rows
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
    scored: list[torch.Tensor] = []

    def head(states: torch.Tensor) -> torch.Tensor:
        scored.append(states)
        return states

    rows = torch.zeros(2, 8, dtype=torch.bool)
    rows[0, 3] = rows[1, 3] = True
    document = Document(torch.randint(0, 40, (9,)), torch.randn(9, 3, 16), torch.eye(9, 40) * 50.0, rows)
    _, scores = score_pack(drafter, head, make_pack([document], drafter.config, torch.device("cpu")), [1.0, 1.0])
    # Row 3 predicts token 5 at step 0, so state 4 speaks; token 6 at step 1, so state 5 does.
    assert torch.cat(scored).argmax(-1).tolist() == [4, 5]
    assert [score.rows for score in scores] == [1, 1]


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
