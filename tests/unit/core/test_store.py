"""The store itself: what reading it costs, eight-bit states, shards of other stores, and published faults of states."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from eagle3_core.contract.store_files import RowEntry, ShardEntry, StoreIndex, StoreMeta
from eagle3_core.data.conversations import TokenRow
from eagle3_core.data.fp8 import dequantise, quantise
from eagle3_core.data.store import HiddenStateStore, check_digest, check_states, check_tokens
from eagle3_core.data.store_writer import ShardWriter
from eagle3_core.errors import BadData
from eagle3_core.verifier import tensors
from tests import tiny
from tests.cases import make_case

META = StoreMeta(
    verifier="/models/verifier",
    config_fingerprint="c",
    tokenizer_fingerprint="t",
    hidden_size=16,
    num_hidden_layers=8,
    vocab_size=64,
    layer_ids=(2, 4, 5),
    last_layer_id=8,
    dtype="bfloat16",
)


@pytest.fixture
def verifier(tmp_path: Path) -> Path:
    return tiny.make_verifier(tmp_path / "verifier")


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each read of tensors took."""
    counts: list[int] = []
    preadv = os.preadv

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        got = preadv(descriptor, buffers, offset)
        counts.append(got)
        return got

    monkeypatch.setattr(tensors.os, "preadv", counted)
    return counts


def test_a_row_of_ten_gigabytes_or_a_slice_of_it_costs_its_own_bytes(tmp_path: Path, bytes_read: list[int]) -> None:
    meta = META.model_copy(update={"hidden_size": 7168, "num_hidden_layers": 61, "last_layer_id": 61})
    lengths, per_token = 1000, 4 * 7168 * 2
    count = 180
    rows = [
        (n, TokenRow(torch.full((lengths,), n % 64), torch.ones(lengths, dtype=torch.bool), "p")) for n in range(count)
    ]
    writer = ShardWriter(tmp_path, 0, meta, rows)
    at = writer._file.tell()
    # A hole in the file stands for the states of all rows but one.
    writer._file.seek(at + 77 * lengths * per_token)
    writer._file.write(torch.ones(lengths * per_token // 2, dtype=torch.bfloat16).view(torch.uint8).numpy().data)
    writer._file.seek(at + count * lengths * per_token)
    writer._states = count * lengths
    entry = writer.close()
    path = tmp_path / entry.file
    assert path.stat().st_size > 10e9 > 1e9 > path.stat().st_blocks * 512
    index = StoreIndex(meta=meta, shards=(entry.model_copy(update={"bytes": path.stat().st_size}),))
    (tmp_path / "index.json").write_text(index.model_dump_json())
    store = HiddenStateStore(tmp_path)
    assert bytes_read == [], "opening reads no tensor"
    row = store.read(77)
    assert row.token_ids_T.tolist() == [77 % 64] * lengths
    assert sum(bytes_read) == lengths * (per_token + 8 + 1)
    bytes_read.clear()
    assert torch.equal(store.read(77, max_seq_len=30).last_TH, row.last_TH[:30])
    assert sum(bytes_read) == 30 * (per_token + 8 + 1)


def test_any_reader_of_safetensors_reads_a_shard(tmp_path: Path, verifier: Path) -> None:
    store = tiny.make_store(tmp_path / "store", verifier)
    shard = store / "shard_00000.safetensors"
    with safe_open(shard, "pt") as opened:
        assert json.loads(opened.metadata()["eyas_states"])["last_state"] == "pre_norm"
    found = load_file(shard)
    assert {name: (value.dtype, list(value.shape)) for name, value in found.items()} == {
        "token_ids": (torch.int64, [96]),
        "loss_mask": (torch.bool, [96]),
        "hidden_states": (torch.bfloat16, [96, 4, tiny.HIDDEN]),
    }
    first = HiddenStateStore(store).read(0)
    assert torch.equal(found["hidden_states"][:24, 3], first.last_TH)


def test_a_shard_is_checked_by_the_digest_of_its_bytes(tmp_path: Path, verifier: Path) -> None:
    store = HiddenStateStore(tiny.make_store(tmp_path / "store", verifier))
    golden = Path(__file__).parents[2] / "golden" / "store-1"
    for directory, entry in (
        (store.directory, store.index.shards[1]),
        (golden, HiddenStateStore(golden).index.shards[0]),
    ):
        check_digest(directory / entry.file, entry)
    path = store.directory / store.index.shards[1].file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadData, match=r"shard_00001.safetensors is not what was written: its blake3 differs"):
        check_digest(path, store.index.shards[1])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"last_state": "post_norm"}, "last_state 'post_norm' instead of 'pre_norm'"),
        ({"config_fingerprint": "other"}, "config_fingerprint 'other' instead of"),
        ({"layer_ids": (3, 5, 6)}, r"layer_ids \(3, 5, 6\) instead of \(2, 4, 5\)"),
        ({"tokenizer_fingerprint": "other"}, "tokenizer_fingerprint 'other' instead of"),
    ],
)
def test_case_d07_shards_of_two_stores_are_not_mixed(
    tmp_path: Path, verifier: Path, changes: dict[str, Any], said: str
) -> None:
    """Both look alike: same shapes, same sizes, same names."""
    mine = tiny.make_store(tmp_path / "mine", verifier)
    other = tiny.make_store(tmp_path / "other", verifier, **changes)
    shutil.copy(other / "shard_00001.safetensors", mine)
    index = json.loads((mine / "index.json").read_text())
    index["shards"][1] = json.loads((other / "index.json").read_text())["shards"][1]
    (mine / "index.json").write_text(json.dumps(index))
    with pytest.raises(BadData, match=rf"shard_00001.safetensors is a shard of another store: its states have {said}"):
        HiddenStateStore(mine)


def test_a_store_that_was_moved_with_its_verifier_is_the_same_store(tmp_path: Path, verifier: Path) -> None:
    store = tiny.make_store(tmp_path / "store", verifier)
    index = json.loads((store / "index.json").read_text())
    index["meta"]["verifier"] = "/elsewhere"
    (store / "index.json").write_text(json.dumps(index))
    assert HiddenStateStore(store).read(3).where.endswith("row 3")


@given(st.integers(-60, 60), st.integers(1, 5), st.integers(0, 2**31))
def test_eight_bits_keep_every_state_to_a_sixteenth(exponent: int, count: int, seed: int) -> None:
    """Of its own size down to 2^-14 of the token's largest one, and of that below."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(count, 4, 32, generator=generator) * 20 - 10
    states = (torch.randn(count, 4, 32, generator=generator) * torch.exp2(spread + exponent)).bfloat16()
    codes, scales = quantise(states)
    assert (codes.dtype, codes.shape, scales.shape) == (torch.float8_e4m3fn, states.shape, states.shape[:2])
    assert torch.equal(scales, torch.exp2(torch.log2(scales).round())), "scales are powers of two"
    back = dequantise(codes, scales)
    exact = codes.double() * scales[..., None].double()
    assert torch.equal(back.double(), exact), "nothing is lost when they are read"
    largest = states.abs().amax(-1, keepdim=True).double()
    off = (back.double() - states.double()).abs()
    assert bool((off <= torch.maximum(states.abs().double() / 16, largest * 2**-17)).all())


def test_eight_bits_of_nothing_and_of_the_largest_numbers() -> None:
    states = torch.zeros(3, 1, 8, dtype=torch.bfloat16)
    states[1] = 1e38
    states[2, 0, 3] = 1e-30
    back = dequantise(*quantise(states))
    assert bool(back[0].eq(0).all())
    assert bool(back[1].isfinite().all())
    assert float(back[2, 0, 3]) == pytest.approx(1e-30, rel=1 / 16)


def test_an_eight_bit_store_takes_half_the_room_and_reads_as_bfloat16(
    tmp_path: Path, verifier: Path, bytes_read: list[int]
) -> None:
    plain = HiddenStateStore(tiny.make_store(tmp_path / "plain", verifier))
    small = HiddenStateStore(tiny.make_store(tmp_path / "small", verifier, dtype="float8_e4m3"))
    bytes_read.clear()
    row = small.read(5, max_seq_len=7)
    assert sum(bytes_read) == 7 * (4 * tiny.HIDDEN + 4 * 4 + 8 + 1)
    wanted = plain.read(5, max_seq_len=7)
    assert row.last_TH.dtype == row.aux_TAH.dtype == torch.bfloat16
    assert torch.equal(row.token_ids_T, wanted.token_ids_T)
    for ours, theirs in ((row.aux_TAH, wanted.aux_TAH), (row.last_TH, wanted.last_TH)):
        assert torch.allclose(ours, theirs, rtol=1 / 16, atol=1e-3)
    sizes = [sum(shard.bytes for shard in store.index.shards) for store in (plain, small)]
    assert 0.5 < sizes[1] / sizes[0] < 0.7, "ids, masks and headers count for much in rows this narrow"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda t: t["scales"][3, 1].fill_(torch.nan), "row 0: 32 NaN and 0 Inf among the states of layer 4"),
        (lambda t: t["scales"][:24, 1].zero_(), "row 0: the states of layer 4 are all zero"),
        (lambda t: t.pop("scales"), "tensor scales is absent"),
        (lambda t: t.update(scales=t["scales"][1:].clone()), r"tensor scales is F32 \[\d+, 4\]"),
    ],
)
def test_damaged_scales_are_refused(tmp_path: Path, verifier: Path, spoil: Any, said: str) -> None:
    store = tiny.make_store(tmp_path / "store", verifier, dtype="float8_e4m3")
    tiny.spoil_shard(store, 0, spoil)
    with pytest.raises(BadData, match=said):
        HiddenStateStore(store).read(0)


def foreign(case: Path, number: int) -> tuple[dict[str, torch.Tensor], list[int]]:
    """One file of a generator, and the tokens of the row it should be of."""
    rows = json.loads((case / "rows.json").read_text())
    return load_file(case / "hidden_states" / f"hs_{number}.safetensors"), rows[number]["input_ids"]


def take(case: Path, number: int) -> None:
    """Judge a foreign file as states that come from a server are."""
    found, ids = foreign(case, number)
    check_tokens(torch.tensor(ids), found["token_ids"], f"row {number}")
    check_states(found["hidden_states"], len(ids), META, f"row {number}")


@pytest.mark.parametrize(
    ("case", "number", "said"),
    [
        ("D01", 1, "row 1: 1 NaN and 0 Inf among the states of layer 5"),
        ("D01", 2, r"row 2: 0 NaN and 1 Inf among the states of last state \(8\)"),
        ("D01", 3, "row 3: the states of layer 2 are all zero"),
        ("D02", 0, r"row 0: the states are those of another text: token 0 is \d+, the row has \d+ there; \d+ of 10"),
        ("D02", 1, "row 1: the states are those of another text: token 0"),
        ("D02", 2, r"row 2: the states are those of another text: token 9 is 63, .*; 1 of 10 differ"),
        ("D03", 0, "row 0: 9 hidden states for 12 tokens"),
        ("D03", 1, "row 1: 13 hidden states for 12 tokens"),
        ("D03", 2, "row 2: states of 9 tokens, the row has 12"),
        ("D05", 0, r"row 0: hidden states of shape \[8, 3, 16\], expected \[8, 4, 16\]"),
        ("D05", 1, r"row 1: hidden states of shape \[8, 5, 16\], expected \[8, 4, 16\]"),
        ("D05", 2, r"row 2: hidden states of shape \[8, 4, 12\], expected \[8, 4, 16\]"),
        ("D05", 3, r"row 3: hidden states of shape \[8, 64\], expected \[8, 4, 16\]"),
    ],
)
def test_published_faults_of_hidden_states_are_refused(tmp_path: Path, case: str, number: int, said: str) -> None:
    with pytest.raises(BadData, match=said):
        take(make_case(case, tmp_path), number)


def test_the_sound_file_beside_them_is_taken(tmp_path: Path) -> None:
    take(make_case("D01", tmp_path), 0)


@pytest.mark.parametrize("name", ["hs_0.safetensors", "shard_00000.safetensors"])
def test_case_d06_half_a_shard_is_no_shard(tmp_path: Path, name: str) -> None:
    """Half of it is there, and a lock beside it."""
    case = make_case("D06", tmp_path) / "hidden_states"
    shard = case / name
    if not shard.exists():
        shutil.copy(case / "hs_0.safetensors", shard)
    rows = (RowEntry(row=0, start=0, length=64, prompt="p"),)
    entry = ShardEntry(file=name, bytes=shard.stat().st_size, blake3="0", rows=rows)
    (case / "index.json").write_text(StoreIndex(meta=META, shards=(entry,)).model_dump_json())
    with pytest.raises(BadData, match=rf"{name}: cut short"):
        HiddenStateStore(case)
