"""Conversations, prepared rows, vocabulary map, split and store."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_core.data.prepared import load_prepared
from eagle3_core.data.split import split_by_prompt
from eagle3_core.data.store import HiddenStateStore, check_states
from eagle3_core.errors import BadData, BadInput
from eagle3_core.model.vocab_map import build_vocab_map, load_vocab_map, save_vocab_map
from tests import tiny
from tests.unit.core.test_golden import GOLDEN


def test_the_draft_vocabulary_is_the_most_frequent_tokens_and_always_the_special_ones(tmp_path: Path) -> None:
    counts = torch.tensor([5, 0, 9, 9, 0, 1, 0, 0])
    vocab_map = build_vocab_map(counts, 4, always=[7])
    assert vocab_map.target_ids_D.tolist() == [0, 2, 3, 7]
    assert vocab_map.d2t_D.tolist() == [0, 1, 1, 4]
    assert vocab_map.t2d_V.nonzero()[:, 0].tolist() == [0, 2, 3, 7]
    assert vocab_map.coverage == 23 / 24
    save_vocab_map(tmp_path, vocab_map)
    assert torch.equal(load_vocab_map(tmp_path).d2t_D, vocab_map.d2t_D)


def test_fewer_tokens_than_the_draft_vocabulary_are_filled_up_by_id() -> None:
    assert build_vocab_map(torch.tensor([0, 0, 0, 3, 0]), 3, always=[]).target_ids_D.tolist() == [0, 1, 3]


def test_ties_are_broken_by_id_whatever_the_size() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 4, (200,), generator=generator)
    for size in (20, 57, 199, 200):
        by_rank = sorted(range(200), key=lambda token: (token not in (150, 199), -int(counts[token]), token))
        assert build_vocab_map(counts, size, [150, 199]).target_ids_D.tolist() == sorted(by_rank[:size])


@pytest.mark.parametrize("size", [0, 6])
def test_a_draft_vocabulary_out_of_bounds_is_refused(size: int) -> None:
    with pytest.raises(BadInput, match="draft_vocab_size"):
        build_vocab_map(torch.ones(5, dtype=torch.int64), size, always=[1])


def test_no_prompt_is_on_both_sides_of_the_split() -> None:
    prompts = [f"p{i % 10}" for i in range(40)]
    train, val = split_by_prompt(prompts, 0.2, seed=0)
    assert sorted(train + val) == list(range(40))
    assert len({prompts[row] for row in val}) == 2
    assert not {prompts[row] for row in train} & {prompts[row] for row in val}
    assert split_by_prompt(prompts, 0.2, seed=0) == (train, val)
    assert split_by_prompt(prompts, 0.2, seed=2) != (train, val)
    assert split_by_prompt(prompts, 0.0, seed=0)[1] == []
    assert split_by_prompt(["only"] * 3, 0.5, seed=0) == ([0, 1, 2], [])


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tiny.make_store(tmp_path / "store", tiny.make_verifier(tmp_path / "verifier"))


def test_a_row_is_read_by_its_own_bytes(store: Path) -> None:
    opened = HiddenStateStore(store)
    assert len(opened.index.shards) > 1, "rows must lie in several shards"
    row = opened.read(5, max_seq_len=7)
    assert row.where.endswith("safetensors, row 5")
    assert (row.aux_TAH.shape, row.last_TH.shape) == ((7, 3, tiny.HIDDEN), (7, tiny.HIDDEN))
    whole = opened.read(5)
    assert torch.equal(whole.aux_TAH[:7], row.aux_TAH)
    assert torch.equal(list(opened.masks())[5][0], whole.token_ids_T)


def spoil(store: Path, value: float) -> tuple[Path, int]:
    """Overwrite one bf16 of the last shard; returns the file and a row of it."""
    opened = HiddenStateStore(store)
    shard = opened.index.shards[-1]
    file = store / shard.file
    start = opened._files[-1].tensors["hidden_states"].start
    data = bytearray(file.read_bytes())
    data[start : start + 2] = torch.tensor([value], dtype=torch.bfloat16).view(torch.int16).numpy().tobytes()
    file.write_bytes(data)
    return file, len(opened) - len(shard.rows)


@pytest.mark.parametrize(("value", "said"), [(float("nan"), "1 NaN and 0 Inf"), (float("inf"), "0 NaN and 1 Inf")])
def test_states_that_are_not_finite_are_refused_by_name(store: Path, value: float, said: str) -> None:
    file, row = spoil(store, value)
    with pytest.raises(BadData, match=f"{file.name}, row {row}: {said} among the states of layer 2"):
        HiddenStateStore(store).read(row)


def test_a_slot_that_is_all_zero_is_refused(tmp_path: Path) -> None:
    verifier = tiny.make_verifier(tmp_path / "verifier")
    meta = HiddenStateStore(tiny.make_store(tmp_path / "store", verifier)).meta
    states = torch.ones(5, 4, tiny.HIDDEN)
    states[:, 3] = 0
    with pytest.raises(BadData, match=r"last state \(8\) are all zero"):
        check_states(states, 5, meta, "row 0")
    with pytest.raises(BadData, match="5 hidden states for 6 tokens"):
        check_states(torch.ones(5, 4, tiny.HIDDEN), 6, meta, "row 0")


def test_a_shard_that_is_cut_or_missing_is_refused_before_anything_is_read(store: Path) -> None:
    shard = store / "shard_00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(BadData, match=r"shard_00001.safetensors has \d+ bytes, index.json says \d+"):
        HiddenStateStore(store)
    shard.unlink()
    with pytest.raises(BadData, match=r"shard_00001.safetensors is missing"):
        HiddenStateStore(store)
    (store / "index.json").unlink()
    with pytest.raises(BadData, match="not a finished hidden-state store"):
        HiddenStateStore(store)


def test_a_draft_vocabulary_that_is_the_first_tokens_is_refused() -> None:
    with pytest.raises(BadInput, match=r"draft_vocab_size 3 cannot be filled from this data.*0..2, an arbitrary slice"):
        build_vocab_map(torch.tensor([4, 0, 3, 0, 0]), 3, always=[])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda t: t.update(d2t=t["d2t"] + torch.arange(4)), "d2t looks absolute"),
        (lambda t: t.update(d2t=t["d2t"] * 0), "d2t is all zero"),
        (lambda t: t.update(t2d=t["t2d"].roll(1)), "name different tokens"),
        (lambda t: t.update(token_counts=t["token_counts"][:3].clone()), "token_counts has 3 entries, t2d 8"),
        (lambda t: t.pop("t2d"), "tensor t2d should be"),
    ],
)
def test_a_damaged_vocabulary_map_is_refused_by_file(tmp_path: Path, spoil: Any, said: str) -> None:
    path = save_vocab_map(tmp_path, build_vocab_map(torch.tensor([5, 0, 9, 9, 0, 1, 0, 0]), 4, always=[7]))
    tensors = load_file(path)
    spoil(tensors)
    save_file(tensors, path)
    with pytest.raises(BadInput, match=f"vocab_map.safetensors: .*{said}.*run prepare again"):
        load_vocab_map(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda t: t["hidden_states"][3, 1, 5].fill_(float("nan")),
            "row 4: 1 NaN and 0 Inf among the states of layer 4",
        ),
        (
            lambda t: t["hidden_states"][3, 1, 5].fill_(float("inf")),
            "row 4: 0 NaN and 1 Inf among the states of layer 4",
        ),
        (lambda t: t["hidden_states"].zero_(), "row 4: the states of layer 2 are all zero"),
        (lambda t: t["hidden_states"][2:4, 3].zero_(), r"last state \(8\) are all zero at 2 of 24 tokens.*token 2"),
        (
            lambda t: t.update(hidden_states=t["hidden_states"][:-3].clone()),
            r"hidden_states is BF16 \[93, 4, 32\].*\[96",
        ),
        (lambda t: t.update(token_ids=t["token_ids"][:-3].clone()), r"tensor token_ids is I64 \[93\].*\[96\]"),
        (lambda t: t.update(loss_mask=t["loss_mask"].repeat(2)), r"tensor loss_mask is BOOL \[192\].*\[96\]"),
        (lambda t: t.pop("token_ids"), "tensor token_ids is absent"),
    ],
)
def test_a_damaged_shard_is_refused_by_file_row_and_slot(store: Path, spoil: Any, said: str) -> None:
    tiny.spoil_shard(store, 1, spoil)
    with pytest.raises(BadData, match=f"shard_00001.safetensors.*{said}"):
        HiddenStateStore(store).read(4)


def test_a_shard_that_is_cut_while_it_is_open_is_bad_data(store: Path) -> None:
    opened = HiddenStateStore(store)
    (store / "shard_00001.safetensors").write_bytes(b"")
    with pytest.raises(BadData, match=r"shard_00001.safetensors: ended inside tensor"):
        opened.read(4)


def test_the_embedding_of_an_unused_token_may_be_zero(tmp_path: Path) -> None:
    verifier = tiny.make_verifier(tmp_path / "verifier")
    meta = HiddenStateStore(tiny.make_store(tmp_path / "store", verifier, layer_ids=(0, 4, 5))).meta
    states = torch.ones(5, 4, tiny.HIDDEN)
    states[2, 0] = 0
    check_states(states, 5, meta, "row 0")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda t: t.pop("offsets"), "tensor offsets should be"),
        (lambda t: t.update(loss_mask=t["loss_mask"][1:].clone()), "16 input_ids and 15 loss_mask"),
        (lambda t: t["offsets"].copy_(torch.tensor([0, 20, 16])), "offsets does not divide 16 tokens into rows"),
    ],
)
def test_damaged_rows_are_refused_by_file(tmp_path: Path, spoil: Any, said: str) -> None:
    shutil.copytree(GOLDEN / "prepared-1", tmp_path / "prepared")
    path = tmp_path / "prepared" / "rows.safetensors"
    tensors = load_file(path)
    spoil(tensors)
    save_file(tensors, path)
    with pytest.raises(BadData, match=f"rows.safetensors: .*{said}"):
        load_prepared(tmp_path / "prepared")
