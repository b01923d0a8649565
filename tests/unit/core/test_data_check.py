"""`eyas data check` and `eyas data stats`: what is found in damaged stores and in other tools' files."""

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import client.data_store
from client.cli import app
from eagle3_core.checkpoint.findings import Verdict
from eagle3_core.contract.verifier_files import read_verifier_files
from eagle3_core.data.store import HiddenStateStore
from eagle3_core.data.store_writer import stored_form
from eagle3_core.data_check.check import check_data
from eagle3_core.data_check.findings import NAMED
from eagle3_core.data_check.stats import stats_of
from eagle3_core.verifier.tensors import load_verifier_weights
from tests import tiny
from tests.cases import make_case
from tests.prepared import write_prepared

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def verifier(tmp_path: Path) -> Path:
    return tiny.make_verifier(tmp_path / "verifier")


@pytest.fixture
def store(tmp_path: Path, verifier: Path) -> Path:
    return tiny.make_store(tmp_path / "store", verifier)


def prepare(directory: Path, store: Path, verifier: Path) -> Path:
    """What a prepare job that led to this store would have left."""
    return write_prepared(directory, verifier, list(HiddenStateStore(store).masks()))


def change_index(store: Path, change: Callable[[dict], object]) -> None:
    index = json.loads((store / "index.json").read_text())
    change(index)
    (store / "index.json").write_text(json.dumps(index))


def said(verdict: Verdict, code: str) -> list[str]:
    return [f"{finding.file}: {finding.message}" for finding in verdict.findings if finding.code == code]


def codes(verdict: Verdict) -> set[str]:
    return {finding.code for finding in verdict.findings}


def test_a_sound_store_is_valid_at_every_level(tmp_path: Path, store: Path, verifier: Path) -> None:
    prepared = prepare(tmp_path / "prepared", store, verifier)
    for level in ("quick", "full"):
        verdict = check_data(store, level=level, prepared=prepared, verifier=verifier)
        assert (verdict.verdict, codes(verdict) - {"measured"}, verdict.level) == ("valid", set(), level)


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (
            lambda t: t["hidden_states"][25, 1, 5].fill_(float("nan")),
            "states_not_finite",
            "row 5: 1 NaN and 0 Inf among the states of layer 4",
        ),
        (
            lambda t: t["hidden_states"][25, 3, 5].fill_(-float("inf")),
            "states_not_finite",
            "row 5: 0 NaN and 1 Inf among the states of the last state (8)",
        ),
        (
            lambda t: t["hidden_states"][24:48, 2].zero_(),
            "states_all_zero",
            "row 5: the states of layer 5 are all zero",
        ),
        (
            lambda t: t["hidden_states"][30:32, 3].zero_(),
            "states_zero",
            "row 5: 2 of 24 states of the last state (8) are zero, the first at token 6",
        ),
        (
            lambda t: t["hidden_states"][:24].copy_(t["hidden_states"][24:48]),
            "states_of_other_row",
            "row 5 holds the states of row 4, and other token ids",
        ),
        (
            lambda t: t["hidden_states"][24:48, 1].copy_(t["hidden_states"][24:48, 0]),
            "slots_alike",
            "row 5: the states of layer 4 are those of layer 2",
        ),
        (
            lambda t: t["hidden_states"][40:44].copy_(t["hidden_states"][39:40]),
            "tokens_alike",
            "row 5: 4 states repeat those of the token before, the first at token 16",
        ),
        (
            lambda t: t["token_ids"][30:32].fill_(tiny.VOCAB),
            "ids_out_of_range",
            f"row 5: 2 token ids lie outside the vocabulary of {tiny.VOCAB}, the first is {tiny.VOCAB} at position 6",
        ),
        (lambda t: t["loss_mask"][24:48].zero_(), "no_answer", "the mask of 1 of 8 rows is empty, the first is row 5"),
        (lambda t: t.update(hidden_states=t["hidden_states"][:-3].clone()), "shard_differs", "hidden_states is BF16"),
        (lambda t: t.pop("loss_mask"), "shard_differs", "tensor loss_mask is absent"),
    ],
)
def test_a_fault_of_a_shard_is_found_by_row_and_slot(
    store: Path, change: Callable[[Tensors], object], code: str, words: str
) -> None:
    file = tiny.spoil_shard(store, 1, change)
    verdict = check_data(store)
    assert codes(verdict) - {"digest_differs"} == {code}
    assert words in said(verdict, code)[0]
    if code != "shard_differs":
        assert said(verdict, "digest_differs") == [f"{file.name}: {file.name}: bytes differ from what was written"]


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (lambda i: i["shards"][1]["rows"][0].update(row=0), "row_twice", "row 0 is listed 2 times"),
        (lambda i: i["shards"][1]["rows"][0].update(row=0), "rows_missing", "1 of 8 rows (4) are not there"),
        (
            lambda i: i["shards"][1]["rows"][1].update(start=20),
            "rows_overlap",
            "row 5 overlaps the one before",
        ),
        (lambda i: i["shards"][1]["rows"].pop(1), "rows_overlap", "row 6 leaves a hole before it (token 48)"),
        (lambda i: i["shards"][1].update(file="../x.safetensors"), "missing_file", "../x.safetensors is listed"),
        (lambda i: i["shards"][1].update(bytes=5), "size_differs", "index.json says 5"),
        (lambda i: i["meta"].update(layer_ids=[4, 2, 5]), "bad_layer_ids", "[4, 2, 5] do not ascend"),
        (lambda i: i["meta"].update(last_layer_id=7), "last_state_early", "entering layer 7, of 8 layers"),
        (lambda i: i["meta"].update(config_fingerprint="0"), "other_verifier", "another config.json"),
        (lambda i: i["meta"].update(tokenizer_fingerprint="0"), "other_tokenizer", "another tokenizer"),
        (lambda i: i["meta"].update(vocab_size=7), "other_verifier", "vocab_size is 7, /"),
        (lambda i: i.update(schema_version=99), "bad_index", "schema_version"),
        (lambda i: i.pop("shards"), "bad_index", "shards"),
        (lambda i: i["shards"][1].update(blake3=None), "bad_index", "has neither a blake3 nor a sha256"),
        (lambda i: i["meta"].pop("last_state"), "meaning_unsaid", "does not say the last_state: 'pre_norm' is taken"),
    ],
)
def test_a_fault_of_the_index_is_found_without_reading_a_state(
    store: Path, verifier: Path, change: Callable[[dict], object], code: str, words: str
) -> None:
    change_index(store, change)
    assert words in said(check_data(store, level="quick", verifier=verifier), code)[0]


def test_an_index_of_nonsense_is_judged_like_any_other(store: Path) -> None:
    def spoil(index: dict) -> None:
        index["shards"][0]["rows"][0]["row"] = 10**12
        index["shards"][1]["rows"][1].update(start=0, length=40)

    change_index(store, spoil)
    tiny.spoil_shard(store, 1, lambda tensors: tensors["hidden_states"][20:44].copy_(tensors["hidden_states"][19:20]))
    verdict = check_data(store)
    assert said(verdict, "rows_missing") == [
        "index.json: 999999999993 of 1000000000001 rows (0, 8, 9, 10, 11, 12, 13, 14, ...) are not there"
    ]
    assert codes(verdict) >= {"rows_overlap", "tokens_alike"}


def test_a_verifier_that_cannot_be_read_keeps_no_store_from_being_judged(tmp_path: Path, store: Path) -> None:
    tiny.spoil_shard(store, 1, lambda tensors: tensors["hidden_states"].zero_())
    assert codes(check_data(store, verifier=tmp_path / "absent")) == {
        "verifier_unreadable",
        "states_all_zero",
        "digest_differs",
    }


def test_a_changed_byte_is_known_by_the_digest(store: Path) -> None:
    file = store / "shard_00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert codes(check_data(store, level="quick")) == set()
    verdict = check_data(store)
    assert (verdict.verdict, codes(verdict)) == ("invalid", {"digest_differs"})


def test_what_is_not_whole_is_named(store: Path) -> None:
    (store / "shard_00000.safetensors").write_bytes((store / "shard_00000.safetensors").read_bytes()[:-9])
    (store / "shard_00001.safetensors").unlink()
    (store / "shard_00009.safetensors").write_bytes(b"x")
    verdict = check_data(store, level="quick")
    assert [(finding.code, finding.file) for finding in verdict.findings] == [
        ("truncated_file", "shard_00000.safetensors"),
        ("missing_file", "shard_00001.safetensors"),
        ("unlisted_file", "shard_00009.safetensors"),
    ]
    (store / "index.json").unlink()
    assert codes(check_data(store)) == {"unfinished_store"}
    assert check_data(store / "absent").verdict == "unreadable"


def test_rows_of_another_preparation_are_named_by_place(tmp_path: Path, store: Path, verifier: Path) -> None:
    prepared = prepare(tmp_path / "prepared", store, verifier)

    def spoil(tensors: Tensors) -> None:
        ids, masks = tensors["token_ids"].view(4, 24), tensors["loss_mask"].view(4, 24)
        ids[[0, 1]] = ids[[1, 0]]
        ids[2, 7] = (ids[2, 7] + 1) % 256
        masks[3, 3] = True

    tiny.spoil_shard(store, 0, spoil)
    verdict = check_data(store, prepared=prepared)
    found = said(verdict, "ids_differ")
    assert [line.partition(" of /")[0] for line in found[:2]] == [
        "shard_00000.safetensors: row 0: holds the token ids of row 1",
        "shard_00000.safetensors: row 1: holds the token ids of row 0",
    ]
    assert "row 2: token ids differ" in found[2]
    assert "first at position 7" in found[2]
    assert said(verdict, "mask_differs")[0].endswith("first at position 3")
    assert "row 3" in said(verdict, "mask_differs")[0]


def test_many_faults_of_one_kind_are_counted(store: Path) -> None:
    change_index(store, lambda index: [row.update(row=99) for shard in index["shards"] for row in shard["rows"]])
    assert said(check_data(store, level="quick"), "row_twice") == ["index.json: row 99 is listed 8 times"]
    for number in range(2):
        tiny.spoil_shard(store, number, lambda tensors: tensors["hidden_states"].zero_())
    found = said(check_data(store), "states_all_zero")
    assert len(found) == NAMED + 1
    assert found[-1] == ": and 24 more"


def test_masks_that_teach_nothing_or_everything(tmp_path: Path, verifier: Path) -> None:
    store = tiny.make_store(tmp_path / "store", verifier, rows=2)

    def one_mask(value: bool) -> Callable[[Tensors], None]:
        def change(tensors: Tensors) -> None:
            tensors["loss_mask"].fill_(value)
            tensors["token_ids"][24:] = tensors["token_ids"][:24]

        return change

    tiny.spoil_shard(store, 0, one_mask(False))
    verdict = check_data(store)
    assert codes(verdict) == {"nothing_supervised", "rows_alike", "digest_differs"}
    tiny.spoil_shard(store, 0, one_mask(True))
    assert codes(check_data(store)) == {"all_supervised", "rows_alike", "digest_differs"}


def test_states_in_small_pieces_are_judged_alike(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.spoil_shard(store, 1, lambda tensors: tensors["hidden_states"][40:44].copy_(tensors["hidden_states"][39:40]))
    whole = check_data(store).findings
    monkeypatch.setattr("eagle3_core.checkpoint.stream.PIECE_BYTES", 300)
    assert check_data(store).findings == whole


# ---------------------------------------------------------------- beside the verifier


def telling_states(verifier: Path, ids: torch.Tensor, normed: bool) -> torch.Tensor:
    """Last states [T, H] from which the verifier's head would give each token that follows."""
    weights = load_verifier_weights(read_verifier_files(verifier))
    wanted = weights.head[ids.roll(-1)] / weights.norm_gain
    normal = wanted / wanted.square().mean(dim=1, keepdim=True).sqrt()
    return normal * weights.norm_gain if normed else normal * 7


def make_telling_store(directory: Path, verifier: Path, normed: bool, **meta: str) -> Path:
    store = tiny.make_store(directory, verifier, rows=6, **meta)
    for number, shard in enumerate(HiddenStateStore(store).index.shards):

        def tell(tensors: Tensors, rows: int = len(shard.rows)) -> None:
            ids = tensors["token_ids"].view(rows, 24)
            last = torch.stack([telling_states(verifier, row, normed) for row in ids])
            stored = stored_form(last.view(-1, 1, tiny.HIDDEN), HiddenStateStore(store).meta)
            for name, part in zip(("hidden_states", "scales"), stored, strict=False):
                tensors[name][:, 3:] = part

        tiny.spoil_shard(store, number, tell)
    return store


def test_the_verifier_tells_of_states_that_belong_to_other_tokens(tmp_path: Path, verifier: Path) -> None:
    store = make_telling_store(tmp_path / "store", verifier, normed=False)
    [measured] = said(check_data(store, verifier=verifier), "measured")
    nats = float(measured.split(" nats")[0].split()[-1])
    assert nats < 1.5

    def swap(tensors: Tensors) -> None:
        states = tensors["hidden_states"].view(4, 24, 4, tiny.HIDDEN)
        states[[0, 1]] = states[[1, 0]]

    tiny.spoil_shard(store, 0, swap)
    verdict = check_data(store, verifier=verifier)
    assert [line.split(":")[1] for line in said(verdict, "unlike_other_rows")] == [" row 0", " row 1"]
    assert "states_shifted" not in codes(verdict)


@pytest.mark.parametrize(("by", "word"), [(1, "late"), (-1, "early")])
def test_states_that_are_out_of_step_with_their_tokens(tmp_path: Path, verifier: Path, by: int, word: str) -> None:
    store = make_telling_store(tmp_path / "store", verifier, normed=False)
    for number, shard in enumerate(HiddenStateStore(store).index.shards):

        def shift(tensors: Tensors, rows: int = len(shard.rows)) -> None:
            states = tensors["hidden_states"].view(rows, 24, 4, tiny.HIDDEN)
            states.copy_(states.roll(by, dims=1))

        tiny.spoil_shard(store, number, shift)
    [found] = said(check_data(store, verifier=verifier), "states_shifted")
    assert found.endswith(f"they lie a token too {word}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3"])
@pytest.mark.parametrize(("normed", "stated"), [(True, "pre_norm"), (False, "post_norm")])
def test_a_store_that_says_the_wrong_thing_of_the_final_norm(
    tmp_path: Path, verifier: Path, normed: bool, stated: str, dtype: str
) -> None:
    store = make_telling_store(tmp_path / "store", verifier, normed, last_state=stated, dtype=dtype)
    verdict = check_data(store, verifier=verifier)
    found = "behind" if normed else "before"
    assert said(verdict, "norm_mislabelled") == [
        f": the last states of 6 of 6 rows are from {found} the final norm, the index says {stated}"
    ]
    right = "post_norm" if normed else "pre_norm"
    change_index(store, lambda index: index["meta"].update(last_state=right))
    assert said(check_data(store, verifier=verifier), "norm_mislabelled") == []


@pytest.mark.parametrize("scale", [0.0, -1.0, 0.3, 3e38])
def test_a_scale_that_eight_bits_are_not_made_with(tmp_path: Path, verifier: Path, scale: float) -> None:
    store = tiny.make_store(tmp_path / "store", verifier, dtype="float8_e4m3")
    assert check_data(store).findings == []
    tiny.spoil_shard(store, 0, lambda tensors: tensors["scales"][25].fill_(scale))
    [found] = said(check_data(store), "bad_scale")
    assert ": row 1: 4 scales are not what" in found


# ---------------------------------------------------------------- other tools' files


def write_file(directory: Path, row: int, length: int = 6) -> Path:
    directory.mkdir(exist_ok=True)
    tensors = {"hidden_states": torch.randn(length, 4, 16), "token_ids": torch.arange(length) + row}
    save_file(tensors, directory / f"hs_{row}.safetensors")
    return directory / f"hs_{row}.safetensors"


def change_file(file: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_files_of_unknown_making_are_compared_with_the_verifier(tmp_path: Path, verifier: Path) -> None:
    (tmp_path / "hs").mkdir()
    for row in range(3):
        ids = torch.randint(0, 256, (20,))
        states = torch.randn(20, 4, tiny.HIDDEN)
        states[:, 3] = telling_states(verifier, ids, normed=True)
        save_file({"hidden_states": states, "token_ids": ids}, tmp_path / "hs" / f"hs_{row}.safetensors")
    verdict = check_data(tmp_path / "hs", verifier=verifier)
    assert (verdict.verdict, codes(verdict)) == ("valid", {"measured", "meaning_unsaid"})
    assert "the last states behind the final norm give" in said(verdict, "measured")[0]

    def before_the_norm(tensors: Tensors) -> None:
        tensors["hidden_states"][:, 3] = telling_states(verifier, tensors["token_ids"], normed=False)

    change_file(tmp_path / "hs" / "hs_1.safetensors", before_the_norm)
    mixed = check_data(tmp_path / "hs", verifier=verifier)
    assert "of 2 of 3 rows are from behind the final norm" in said(mixed, "norm_mixed")[0]


def test_files_with_the_states_of_another_row_or_tokens_of_another_verifier(tmp_path: Path, verifier: Path) -> None:
    (tmp_path / "hs").mkdir()
    states = torch.randn(20, 4, tiny.HIDDEN)
    for row in range(3):
        tensors = {"hidden_states": states + row // 2, "token_ids": torch.arange(20) + row}
        save_file(tensors, tmp_path / "hs" / f"hs_{row}.safetensors")
    change_file(tmp_path / "hs" / "hs_2.safetensors", lambda tensors: tensors["token_ids"][3:5].fill_(tiny.VOCAB))
    verdict = check_data(tmp_path / "hs", verifier=verifier)
    assert verdict.verdict == "invalid"
    assert said(verdict, "states_of_other_row")[0].endswith("row 1 holds the states of row 0, and other token ids")
    assert "2 token ids lie outside the vocabulary of 259" in said(verdict, "ids_out_of_range")[0]


def test_files_that_disagree_on_the_slots_are_all_named_where_none_is_usual(tmp_path: Path) -> None:
    for row in range(4):
        write_file(tmp_path / "hs", row)
    for row in (0, 1):
        change_file(tmp_path / "hs" / f"hs_{row}.safetensors", fewer_slots)
    assert len(said(check_data(tmp_path / "hs"), "slots_differ")) == 4
    assert "--slots" in said(check_data(tmp_path / "hs"), "slots_differ")[0]
    assert len(said(check_data(tmp_path / "hs", slots=4), "slots_differ")) == 2


def fewer_slots(tensors: Tensors) -> None:
    tensors["hidden_states"] = tensors["hidden_states"][:, :3].contiguous()


def test_a_file_whose_lock_is_held_is_left_alone(tmp_path: Path) -> None:
    for row in range(3):
        write_file(tmp_path / "hs", row)
    lock = tmp_path / "hs" / "hs_1.safetensors.lock"
    descriptor = os.open(lock, os.O_CREAT | os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        assert codes(check_data(tmp_path / "hs")) == {"being_written", "rows_missing", "meaning_unsaid"}
    finally:
        os.close(descriptor)
    verdict = check_data(tmp_path / "hs")
    assert (verdict.verdict, codes(verdict)) == ("valid", {"orphan_lock", "meaning_unsaid"})


def test_locks_without_a_file_and_two_files_for_a_row(tmp_path: Path) -> None:
    for row in range(2):
        write_file(tmp_path / "hs", row)
    (tmp_path / "hs" / "hs_2.safetensors.lock").touch()
    (tmp_path / "hs" / "hs_01.safetensors").write_bytes((tmp_path / "hs" / "hs_1.safetensors").read_bytes())
    verdict = check_data(tmp_path / "hs")
    assert (verdict.verdict, codes(verdict)) == (
        "invalid",
        {"row_twice", "orphan_lock", "meaning_unsaid"},
    )
    assert said(verdict, "orphan_lock")[0].endswith("is nobody's, and hs_2.safetensors is not there")


@pytest.mark.parametrize(
    ("case", "found"),
    [
        (
            "D01",
            [
                ("states_not_finite", "hs_1", "row 1: 1 NaN and 0 Inf among the states of slot 2"),
                ("states_not_finite", "hs_2", "row 2: 0 NaN and 1 Inf among the states of slot 3"),
                *(("states_all_zero", "hs_3", f"row 3: the states of slot {slot} are all zero") for slot in range(4)),
            ],
        ),
        (
            "D02",
            [
                ("ids_differ", "hs_0", "row 0: holds the token ids of row 1"),
                ("ids_differ", "hs_1", "row 1: holds the token ids of row 0"),
                ("ids_differ", "hs_2", "first at position 9: 63 here"),
            ],
        ),
        (
            "D03",
            [
                ("lengths_differ", "hs_0", "9 hidden states for 12 token ids"),
                ("lengths_differ", "hs_1", "13 hidden states for 12 token ids"),
                ("ids_differ", "hs_2", "row 2: holds 9 token ids, 12 in"),
            ],
        ),
        (
            "D05",
            [
                ("slots_differ", "hs_0", "BF16 [8, 3, 16], expected [tokens, 4, 16]"),
                ("slots_differ", "hs_1", "BF16 [8, 5, 16], expected [tokens, 4, 16]"),
                ("slots_differ", "hs_2", "BF16 [8, 4, 12], expected [tokens, 4, 16]"),
                ("slots_differ", "hs_3", "BF16 [8, 64], expected [tokens, 4, 16]: 4 states a token lie in one"),
            ],
        ),
        (
            "D06",
            [
                ("truncated_file", "hs_0", "cut short"),
                ("rows_missing", "", "1 of 2 rows (0) have no sound file"),
                ("orphan_lock", "hs_0", "is not: it died while it wrote"),
                ("orphan_lock", "hs_1", "is whole"),
            ],
        ),
        (
            "D09",
            [
                ("truncated_file", "hs_4", "empty file (0 bytes)"),
                ("rows_missing", "", "3 of 6 rows (2, 4, 5) have no sound file"),
                ("unlisted_file", "hs_5.safetensors.tmp", "is not named"),
                ("unlisted_file", "hs_x", "is not named"),
            ],
        ),
    ],
)
def test_published_hidden_states(tmp_path: Path, case: str, found: list[tuple[str, str, str]]) -> None:
    made = make_case(case, tmp_path)
    verdict = check_data(made, prepared=made / "rows.json", slots=4)
    assert verdict.verdict == "invalid"
    told = [finding for finding in verdict.findings if finding.code not in ("meaning_unsaid", "rows_alike")]
    for finding, (code, name, words) in zip(told, found, strict=True):
        assert finding.code == code
        assert name in finding.file
        assert words in finding.message


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[" * 100_000,
        '[{"input_ids": [1]}]',
        '[{"input_ids": [1], "loss_mask": [2]}]',
        '[{"input_ids": [99999999999999999999], "loss_mask": [1]}]',
    ],
)
def test_rows_that_cannot_be_read_are_a_finding(tmp_path: Path, store: Path, text: str) -> None:
    (tmp_path / "rows.json").write_text(text)
    verdict = check_data(store, prepared=tmp_path / "rows.json")
    assert (verdict.verdict, codes(verdict)) == ("suspect", {"rows_unreadable"})


def test_a_line_of_rows_ends_at_its_line_end_alone(tmp_path: Path, store: Path) -> None:
    """Texts beside the ids may hold U+2028 and its like, which other readers take for line ends."""
    rows = [
        {"input_ids": ids.tolist(), "loss_mask": mask.int().tolist(), "text": "one\u2028two\x85"}
        for ids, mask in HiddenStateStore(store).masks()
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    assert check_data(store, prepared=tmp_path / "rows.jsonl").findings == []


# ---------------------------------------------------------------- the commands


def test_the_commands(tmp_path: Path, store: Path, verifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_nice: list[bool] = []
    monkeypatch.setattr(client.data_store, "be_nice", lambda: made_nice.append(True))

    def run(*arguments: object) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["data", *map(str, arguments)])
        return result.exit_code, result.output

    code, text = run("check", store, "--json")
    assert (code, json.loads(text)) == (0, {"verdict": "valid", "level": "full", "findings": []})
    assert "measured" in run("check", store, "--verifier", verifier)[1]
    tiny.spoil_shard(store, 1, lambda tensors: tensors["hidden_states"].zero_())
    looked = len(made_nice)
    assert run("check", store, "--level", "quick")[0] == 0
    assert len(made_nice) == looked == 2, "what takes milliseconds waits for nobody"
    code, text = run("check", store)
    assert code == 2
    assert "states_all_zero" in text
    code, text = run("check", store, "--format", "sarif")
    assert {result["ruleId"] for result in json.loads(text)["runs"][0]["results"]} >= {"states_all_zero"}
    assert run("check", tmp_path / "absent")[0] == 3
    assert "slots_differ" in run("check", store, "--slots", "3")[1]
    assert run("check", store, "--level", "quick", "--max-mb-per-s", "5")[0] == 4

    vocab_map = tiny.make_vocab_map(tmp_path / "map", store)
    code, text = run("stats", store, "--map", vocab_map, "--json")
    stats = json.loads(text)
    assert (code, stats["rows"], stats["length"]["p95"], stats["supervised_share"]) == (0, 8, 24, 0.5)
    assert "64 tokens cover" in run("stats", store, "--map", vocab_map)[1]
    for token in (-7, 1 << 40):
        tiny.spoil_shard(store, 1, lambda tensors, token=token: tensors["token_ids"].fill_(token))
        code, text = run("stats", store)
        assert (code, "holds what is no token id" in " ".join(text.split())) == (1, True)
    assert run("stats", tmp_path)[0] == 1


def test_stats_of_a_store_and_of_what_it_was_made_from(tmp_path: Path, store: Path, verifier: Path) -> None:
    prepared = prepare(tmp_path / "prepared", store, verifier)
    assert stats_of(store) == stats_of(prepared)
    answers = torch.cat([ids[mask] for ids, mask in HiddenStateStore(store).masks()])
    map_dir = tiny.make_vocab_map(tmp_path / "map", store, size=16)
    stats = stats_of(store, map_dir)
    counts = torch.bincount(answers).sort(descending=True).values
    # One place of 16 is the end of text, which the random rows never hold.
    assert stats.coverage == int(counts[:15].sum()) / len(answers)
    assert (stats.draft_vocab_size, stats.unused_draft_tokens) == (16, 1)
    assert stats.distinct_tokens == len(answers.unique())
