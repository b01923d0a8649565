"""An extraction that is ended anywhere goes on where it was, and the store is the same byte for byte."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_core.contract.params import ExtractParams
from eagle3_core.data.store import HiddenStateStore
from eagle3_core.errors import BadData
from tests import tiny
from tests.killed import outputs_at_kills
from tests.prepared import write_prepared
from tests.unit.core.test_stages import Bench
from worker import states
from worker.context import StageContext, Stopped

SHARD = "shard_{:05d}.safetensors"


def make_prepared(directory: Path, verifier: Path, rows: int, longest: int = 240) -> Path:
    """Rows of random tokens, of all lengths up to `longest`."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for _ in range(rows):
        length = 8 + int(torch.randint(0, longest - 7, (1,), generator=generator))
        ids = torch.randint(0, 256, (length,), generator=generator)
        made.append((ids, torch.arange(length) >= length // 2))
    return write_prepared(directory, verifier, made)


@pytest.fixture
def order(tmp_path: Path) -> dict[str, Any]:
    """An extraction into six shards or so."""
    verifier = tiny.make_verifier(tmp_path / "v" / "verifier")
    prepared = make_prepared(tmp_path / "prepared", verifier, rows=100)
    return {
        "verifier": str(verifier),
        "prepared_dir": str(prepared),
        "aux_layer_ids": [2, 4, 5],
        "batch_tokens": 1024,
        "shard_mb": 1,
        "dtype": "float32",
        "store_dtype": "float32",
    }


@pytest.mark.parametrize("kills", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_a_store_is_the_same_after_kills_at_random_moments(tmp_path: Path, order: dict[str, Any], kills: int) -> None:
    params = ExtractParams.model_validate(order | {"aux_layer_ids": (2, 4, 5), "device": "cpu"})
    there = outputs_at_kills(tmp_path, "extract", params, kills)
    shards = [sum(name.startswith("shard_") for name in names) for names in there]
    assert any(0 < count < 6 for count in shards), "no kill came in the middle of the work"


class Extraction:
    """Runs one order again and again, into directories of its choice."""

    def __init__(self, bench: Bench, order: dict[str, Any], patch: pytest.MonkeyPatch) -> None:
        self.bench, self.order = bench, order
        self.passes: list[int] = []
        """Rows of each batch that ran."""
        read = states.StateReader.read

        def counted(reader: states.StateReader, rows: Any, numbers: Any, place: Any) -> torch.Tensor:
            self.passes += numbers
            return read(reader, rows, numbers, place)

        patch.setattr(states.StateReader, "read", counted)

    def into(self, directory: Path, **changes: Any) -> Any:
        """Extract there; whatever is there already may be gone on from."""
        self.passes.clear()
        return self.bench.run("extract", output=directory, **{**self.order, "device": "cpu", **changes})


@pytest.fixture
def extraction(tmp_path: Path, order: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Extraction:
    return Extraction(Bench(tmp_path / "bench"), order, monkeypatch)


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def rows_of(store: Path, *shards: int) -> list[int]:
    index = HiddenStateStore(store).index
    return [row.row for number in shards for row in index.shards[number].rows]


def unfinish(store: Path) -> None:
    """What an attempt leaves that was killed before it wrote the index."""
    index = json.loads((store / "index.json").read_bytes())
    lines = [index["meta"], *index["shards"]]
    (store / "unfinished.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (store / "index.json").unlink()


def test_case_d09_only_what_is_missing_or_broken_is_extracted_again(tmp_path: Path, extraction: Extraction) -> None:
    """Gaps, empty files, half files, changed bytes, temporary files, odd names and locks of dead writers."""
    result = extraction.into(tmp_path / "whole")
    assert result.data["shards"] >= 5
    assert sorted(extraction.passes) == list(range(100))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    shutil.copytree(whole, broken)
    unfinish(broken)
    (broken / SHARD.format(0)).unlink()
    (broken / SHARD.format(1)).write_bytes(b"")
    data = (broken / SHARD.format(2)).read_bytes()
    (broken / SHARD.format(2)).write_bytes(data[: len(data) // 2])
    data = bytearray((broken / SHARD.format(3)).read_bytes())
    data[len(data) // 2] ^= 1
    (broken / SHARD.format(3)).write_bytes(data)
    odd = {".shard_00000.safetensors.99.tmp": b"x", "shard_x.safetensors": b"x", f"{SHARD.format(4)}.lock": b""}
    for name, content in odd.items():
        (broken / name).write_bytes(content)
    again = extraction.into(broken)
    assert extraction.passes == rows_of(whole, 0, 1, 2, 3)
    assert files(broken) == files(whole) | odd
    assert again.data == result.data
    assert extraction.bench.warned() == ["shard_redone"] * 4
    messages = [event["message"] for event in extraction.bench.events("warning")]
    for shard, said in enumerate(("is missing", "has 0 bytes", r"bytes, index.json says", "is not what was written")):
        assert SHARD.format(shard) in messages[shard] and said in messages[shard]


def test_nothing_left_to_do_ends_cleanly(tmp_path: Path, extraction: Extraction) -> None:
    """Killed behind the last shard, or behind the index, or behind its result."""
    result = extraction.into(tmp_path / "store")
    before = files(tmp_path / "store")
    for _ in range(2):
        again = extraction.into(tmp_path / "store")
        assert (extraction.passes, again.data, files(tmp_path / "store")) == ([], result.data, before)
        unfinish(tmp_path / "store")


def test_a_torn_line_is_a_shard_that_does_not_count(tmp_path: Path, extraction: Extraction) -> None:
    extraction.into(tmp_path / "store")
    before = files(tmp_path / "store")
    last = rows_of(tmp_path / "store", len(HiddenStateStore(tmp_path / "store").index.shards) - 1)
    unfinish(tmp_path / "store")
    journal = tmp_path / "store" / "unfinished.jsonl"
    journal.write_bytes(journal.read_bytes()[:-7])
    extraction.into(tmp_path / "store")
    assert extraction.passes == last
    assert files(tmp_path / "store") == before
    unfinish(tmp_path / "store")
    journal.write_bytes(b"{}\n" + journal.read_bytes())
    extraction.into(tmp_path / "store")
    assert len(extraction.passes) == 100
    assert "unfinished.jsonl is damaged" in extraction.bench.events("warning")[0]["message"]
    assert files(tmp_path / "store") == before


def test_shards_of_another_store_or_of_other_rows_are_extracted_anew(tmp_path: Path, extraction: Extraction) -> None:
    extraction.into(tmp_path / "store", aux_layer_ids=(1, 4, 5))
    extraction.into(tmp_path / "plain")
    extraction.into(tmp_path / "store")
    assert len(extraction.passes) == 100
    assert "layer_ids (1, 4, 5) instead of (2, 4, 5)" in extraction.bench.events("warning")[0]["message"]
    assert files(tmp_path / "store") == files(tmp_path / "plain")
    shutil.rmtree(extraction.order["prepared_dir"])
    make_prepared(Path(extraction.order["prepared_dir"]), Path(extraction.order["verifier"]), rows=99)
    extraction.into(tmp_path / "store")
    assert "holds other rows than are to be extracted now" in extraction.bench.events("warning")[0]["message"]
    assert len(HiddenStateStore(tmp_path / "store")) == 99


def test_a_stop_keeps_whole_shards_and_nothing_else(
    tmp_path: Path, extraction: Extraction, monkeypatch: pytest.MonkeyPatch
) -> None:
    extraction.into(tmp_path / "whole")
    check = StageContext.check_stop

    def stop_in_the_third_shard(context: StageContext) -> None:
        if len(list((tmp_path / "store").glob("shard_*"))) == 2:
            context.stop_requested.set()
        check(context)

    monkeypatch.setattr(StageContext, "check_stop", stop_in_the_third_shard)
    with pytest.raises(Stopped):
        extraction.into(tmp_path / "store")
    monkeypatch.setattr(StageContext, "check_stop", check)
    there = sorted(path.name for path in (tmp_path / "store").iterdir())
    assert there[:2] == [SHARD.format(0), SHARD.format(1)] and there[-1] == "unfinished.jsonl"
    kept = len(there) - 1
    with pytest.raises(BadData, match="not a finished hidden-state store"):
        HiddenStateStore(tmp_path / "store")
    extraction.into(tmp_path / "store")
    shards = len(HiddenStateStore(tmp_path / "whole").index.shards)
    assert extraction.passes == rows_of(tmp_path / "whole", *range(kept, shards))
    assert files(tmp_path / "store") == files(tmp_path / "whole")
    progress = extraction.bench.events("progress")
    assert (progress[-1]["step"], progress[-1]["steps"]) == (100, 100)
