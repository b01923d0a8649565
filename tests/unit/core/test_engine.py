"""The training engine against training-time test written plainly, in float64: the same loss, the same gradients."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from eagle3_core.contract.drafter_config import MLA
from eagle3_core.model.drafter import Eagle3Drafter
from eagle3_core.training import rows as rows_module
from eagle3_core.training.engine import Document, make_pack, score_pack
from eagle3_core.training.losses import LOSSES, LossName, mixture
from eagle3_core.training.rows import plan_rows
from eagle3_core.training.ttt import counted_rows
from tests.plain import plain_loss, plain_scores
from tests.unit.core.test_ttt import small_drafter

HIDDEN, VOCAB, DRAFT, STEPS = 16, 40, 30, 3
CPU = torch.device("cpu")
LATENT = MLA(q_lora_rank=6, kv_lora_rank=5, qk_nope_head_dim=3, qk_rope_head_dim=4, v_head_dim=2)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
FLAGS = {
    "plain": {},
    "norm_output": {"norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "eagle_3_1": {"fc_norm": True, "norm_output": True},
    "attention_bias": {"attention_bias": True},
    "qk_norm": {"qk_norm": True},
    "sliding_window": {"sliding_window": 7},
    "mla": {"mla": LATENT, "rope": YARN},
    "mla_two_layers": {"mla": LATENT, "num_hidden_layers": 2, "fc_norm": True, "norm_output": True},
    "two_layers": {"num_hidden_layers": 2, "sliding_window": 200},
    "three_layers": {"num_hidden_layers": 3, "norm_output": True, "norm_before_residual": True},
}


def drafter_of(**changes: object) -> Eagle3Drafter:
    drafter = small_drafter(draft_vocab_size=DRAFT, **changes).double()
    for parameter in drafter.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return drafter


def document(length: int, mask: Tensor | None = None, rows_KR: Tensor | None = None) -> Document:
    if mask is None:
        mask = torch.rand(length) < 0.8
        mask[:4] = False
    rows_KR = counted_rows(mask, STEPS) if rows_KR is None else rows_KR
    states = torch.randn(length, 4, HIDDEN, dtype=torch.float64)
    return Document(torch.randint(0, VOCAB, (length,)), states[:, :3], states[:, 3], rows_KR)


def any_rows(length: int) -> Tensor:
    """Rows that are not nested: each step's own."""
    rows = torch.rand(STEPS, length - 1) < 0.3
    for step in range(STEPS):
        rows[step, length - 2 - step :] = False
    return rows


def target_head() -> Callable[[Tensor], Tensor]:
    weight = torch.randn(DRAFT, HIDDEN, dtype=torch.float64)
    return lambda states: states @ weight.T


def gradients(drafter: Eagle3Drafter, loss: Tensor) -> dict[str, Tensor]:
    drafter.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}


def difference(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> float:
    """Largest relative difference of any gradient."""
    assert set(ours) == set(plain)
    return max(float((ours[name] - plain[name]).norm() / plain[name].norm()) for name in plain)


def weights_of(documents: Sequence[Document]) -> list[float]:
    counts = torch.stack([each.rows_KR.sum(1) for each in documents]).sum(0).tolist()
    return [0.8**k / count for k, count in enumerate(counts)]


@pytest.fixture
def documents() -> list[Document]:
    torch.manual_seed(1)
    return [document(20), document(7, mask=torch.zeros(7, dtype=torch.bool)), document(9), document(300)]


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("nested", [True, False])
def test_loss_and_every_gradient_equal_the_plain_form(
    documents: list[Document], flags: dict[str, object], nested: bool
) -> None:
    drafter, head = drafter_of(**flags), target_head()
    if not nested:
        documents = [document(len(each.token_ids_T), rows_KR=any_rows(len(each.token_ids_T))) for each in documents]
    weights = weights_of(documents)
    plain = plain_loss(drafter, head, documents, weights)
    expected = gradients(drafter, plain)
    pack = make_pack(documents, drafter.config, CPU, torch.float64)
    loss, scores = score_pack(drafter, head, pack, weights)
    assert abs(loss.item() / plain.item() - 1) < 1e-13
    assert difference(gradients(drafter, loss), expected) < 1e-13
    each = [plain_scores(drafter, head, one) for one in documents]
    for step, score in enumerate(scores):
        assert score.rows == sum(one[step].rows for one in each)
        assert int(score.correct) == sum(int(one[step].correct) for one in each)
        assert score.loss_sum.item() == pytest.approx(sum(one[step].loss_sum.item() for one in each), rel=1e-12)


def test_the_embedding_is_trained_on_every_token_that_joins_a_row(documents: list[Document]) -> None:
    drafter, head = drafter_of(), target_head()
    drafter.embed_tokens.weight.requires_grad_()
    weights = weights_of(documents)
    expected = gradients(drafter, plain_loss(drafter, head, documents, weights))
    loss, _ = score_pack(drafter, head, make_pack(documents, drafter.config, CPU, torch.float64), weights)
    ours = gradients(drafter, loss)
    assert difference(ours, expected) < 1e-13
    joined = {int(token) for each in documents if each.rows_KR.any() for token in each.token_ids_T[1:]}
    assert set(ours["embed_tokens.weight"].any(1).nonzero()[:, 0].tolist()) <= joined


def test_a_head_that_is_frozen_gets_no_gradient_and_changes_no_other(documents: list[Document]) -> None:
    drafter, head = drafter_of(), target_head()
    pack = make_pack(documents, drafter.config, CPU, torch.float64)
    trained = gradients(drafter, score_pack(drafter, head, pack, [1.0] * STEPS)[0])
    drafter.lm_head.weight.requires_grad_(False)
    frozen = gradients(drafter, score_pack(drafter, head, pack, [1.0] * STEPS)[0])
    assert set(trained) - set(frozen) == {"lm_head.weight"}
    assert all(torch.equal(trained[name], frozen[name]) for name in frozen)


def test_rows_that_seem_not_to_count_do(documents: list[Document]) -> None:
    """Leaving out the keys of unsupervised rows, or what only a later step needs, is another loss."""
    drafter, head = drafter_of(), target_head()
    whole = documents[0]
    weights = weights_of([whole])
    plain = plain_loss(drafter, head, [whole], weights)
    first = int(whole.rows_KR[0].nonzero()[0])
    cut = Document(whole.token_ids_T[first:], whole.aux_TAH[first:], whole.last_TH[first:], whole.rows_KR[:, first:])
    loss, _ = score_pack(drafter, head, make_pack([cut], drafter.config, CPU, torch.float64), weights)
    assert abs(loss.item() / plain.item() - 1) > 1e-4


@pytest.mark.parametrize(("chunk", "block"), [(1, 1), (7, 5), (1000, 1000)])
def test_the_sizes_of_chunks_and_blocks_change_nothing(
    documents: list[Document], monkeypatch: pytest.MonkeyPatch, chunk: int, block: int
) -> None:
    drafter, head = drafter_of(), target_head()
    weights = weights_of(documents)
    expected = gradients(drafter, plain_loss(drafter, head, documents, weights))
    monkeypatch.setattr(rows_module, "CHUNK_TARGETS", chunk)
    monkeypatch.setattr(rows_module, "QUERY_BLOCK", block)
    loss, _ = score_pack(drafter, head, make_pack(documents, drafter.config, CPU, torch.float64), weights)
    assert difference(gradients(drafter, loss), expected) < 1e-13


def test_neither_packing_nor_accumulation_changes_the_gradient(documents: list[Document]) -> None:
    drafter, head = drafter_of(), target_head()
    weights = weights_of(documents)

    def summed(shape: list[list[Document]]) -> dict[str, Tensor]:
        packs = [make_pack(each, drafter.config, CPU, torch.float64) for each in shape]
        return gradients(drafter, torch.stack([score_pack(drafter, head, pack, weights)[0] for pack in packs]).sum())

    one = summed([documents])
    assert difference(summed([documents[::-1]]), one) < 1e-13
    assert difference(summed([documents[:3], documents[3:]]), one) < 1e-13
    assert difference(summed([[documents[0]], [documents[2]], [documents[3]]]), one) < 1e-13


def test_what_stands_in_one_document_does_not_reach_another() -> None:
    torch.manual_seed(2)
    drafter, head = drafter_of(), target_head()
    # The second document is supervised from its first tokens on, where a shift could reach across the boundary.
    first = document(12, mask=torch.ones(12, dtype=torch.bool))
    second = document(10, mask=torch.arange(10) < 2)
    states = first.aux_TAH.clone().requires_grad_()
    joined = Document(first.token_ids_T, states, first.last_TH, torch.zeros_like(first.rows_KR))
    pack = make_pack([joined, second], drafter.config, CPU, torch.float64)
    alone = make_pack([second], drafter.config, CPU, torch.float64)
    loss = score_pack(drafter, head, pack, [1.0] * STEPS)[0]
    loss.backward()
    assert states.grad is None or not states.grad.any()
    assert loss.item() == score_pack(drafter, head, alone, [1.0] * STEPS)[0].item()


def test_a_pack_without_a_counted_row_has_no_loss() -> None:
    empty = document(9, mask=torch.zeros(9, dtype=torch.bool))
    drafter = drafter_of()
    loss, scores = score_pack(
        drafter, target_head(), make_pack([empty, empty], drafter.config, CPU, torch.float64), [1.0] * STEPS
    )
    assert loss.item() == 0
    assert [score.rows for score in scores] == [0, 0, 0]


@pytest.mark.parametrize("flags", [FLAGS["plain"], FLAGS["sliding_window"], FLAGS["mla_two_layers"]])
def test_a_pack_holds_every_place_where_it_is_needed(documents: list[Document], flags: dict[str, object]) -> None:
    """On a device other than the CPU: one product of tensors on two devices, or one value read back, and it fails."""
    meta = torch.device("meta")
    drafter = drafter_of(**flags).to(meta)
    documents = [document(len(each.token_ids_T), rows_KR=any_rows(len(each.token_ids_T))) for each in documents]
    pack = make_pack(documents, drafter.config, meta, torch.float64)
    head = torch.randn(DRAFT, HIDDEN, dtype=torch.float64, device=meta)
    loss, _ = score_pack(drafter, lambda states: states @ head.T, pack, [1.0] * STEPS)
    loss.backward()
    assert {p.grad.device.type for p in drafter.parameters() if p.grad is not None} == {"meta"}


def test_only_rows_that_count_are_computed() -> None:
    mask = torch.zeros(100, dtype=torch.bool)
    mask[60:80] = True
    plan = plan_rows([counted_rows(mask, STEPS), counted_rows(torch.zeros(50, dtype=torch.bool), STEPS)])
    # Row 59 is the first to draft an answer that starts at token 60, row 77 the last to draft its token 79.
    assert plan.key_rows == (78, 0)
    assert [len(step.keys_U) for step in plan.steps] == [19, 18, 17]
    assert plan.counts == (19, 18, 17)
    assert len(torch.arange(78)[plan.target_slots]) == 19


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_its_own_gradient(documents: list[Document], name: LossName) -> None:
    drafter, head = drafter_of(), target_head()
    weights = weights_of(documents)
    plain = plain_loss(drafter, head, documents, weights, LOSSES[name])
    expected = gradients(drafter, plain)
    loss, _ = score_pack(
        drafter, head, make_pack(documents, drafter.config, CPU, torch.float64), weights, mixture({name: 1.0})
    )
    assert abs(loss.item() / plain.item() - 1) < 1e-12
    assert difference(gradients(drafter, loss), expected) < 1e-12


def test_a_mixture_is_the_weighted_sum(documents: list[Document]) -> None:
    drafter, head = drafter_of(), target_head()
    pack = make_pack(documents, drafter.config, CPU, torch.float64)

    def of(weights: dict[LossName, float]) -> float:
        return score_pack(drafter, head, pack, [1.0] * STEPS, mixture(weights))[0].item()

    assert of({"forward_kl": 0.25, "tv": 2.0}) == pytest.approx(0.25 * of({"forward_kl": 1.0}) + 2 * of({"tv": 1.0}))


def test_the_losses_of_two_known_distributions() -> None:
    p, q = torch.tensor([[0.75, 0.25]]).double().log(), torch.tensor([[0.5, 0.5]]).double().log()
    values = {name: float(loss(p, q)) for name, loss in LOSSES.items()}
    kl = 0.75 * torch.tensor(1.5).log() + 0.25 * torch.tensor(0.5).log()
    share = torch.tensor(0.75)
    blend = torch.exp(-3 * share)
    assert values["forward_kl"] == pytest.approx(float(kl))
    assert values["soft_ce"] == pytest.approx(float(torch.tensor(2.0).log()))
    assert values["reverse_kl"] == pytest.approx(float(-0.5 * torch.tensor(0.75).log()))
    assert values["tv"] == pytest.approx(0.25)
    assert values["lk_alpha"] == pytest.approx(float(-share.log()))
    assert values["lk_hybrid"] == pytest.approx(float(blend * kl + (1 - blend) * 0.25))
    middle = torch.tensor([0.625, 0.375]).log()
    jsd = ((p.exp()[0] * (p[0] - middle)).sum() + (q.exp()[0] * (q[0] - middle)).sum()) / 2
    assert values["jsd"] == pytest.approx(float(jsd), rel=1e-6)


def test_bfloat16_is_near_float32(documents: list[Document]) -> None:
    drafter, head = drafter_of().float(), target_head()
    pack = make_pack(documents, drafter.config, CPU)
    wide = score_pack(drafter, lambda h: head(h.double()).float(), pack, weights_of(documents))[0]
    expected = gradients(drafter, wide)
    narrow = score_pack(drafter, lambda h: head(h.double()).float(), pack, weights_of(documents), dtype=torch.bfloat16)[
        0
    ]
    assert narrow.item() == pytest.approx(wide.item(), rel=0.02)
    ours = gradients(drafter, narrow)
    assert {grad.dtype for grad in ours.values()} == {torch.float32}
    assert difference(ours, expected) < 0.1


def test_more_steps_than_tokens_are_scored_as_far_as_there_are_any() -> None:
    rows = counted_rows(torch.tensor([False, True, True, True]), 9)
    drafter = drafter_of()
    pack = make_pack([document(4, rows_KR=rows)], drafter.config, CPU, torch.float64)
    loss, scores = score_pack(drafter, target_head(), pack, [1.0] * 9)
    assert [score.rows for score in scores] == [2, 1, *[0] * 7]
    assert torch.isfinite(loss)
