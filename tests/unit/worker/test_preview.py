"""`eyas data preview`: rows of a file, of a prepared directory and of a store, and what is trained on."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from client.cli import app
from eagle3_core.contract.events import EventWriter
from eagle3_core.contract.params import PrepareParams
from tests import tiny
from worker import preview
from worker.context import StageContext
from worker.stages import prepare


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A verifier, twelve conversations and two odd lines behind them."""
    tiny.make_verifier(tmp_path / "verifier")
    path = tiny.make_conversations(tmp_path / "c.jsonl", 12)
    odd = {"messages": [{"role": "user", "content": "\x1b[31mred"}, {"role": "assistant", "content": "ok"}]}
    with path.open("a") as file:
        file.write(json.dumps(odd) + "\n[]\n")
    return tmp_path


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["data", "preview", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["data", "preview", *map(str, arguments)])
    assert result.exit_code == 1, result.output
    return result.output


def test_a_file_of_conversations(place: Path) -> None:
    out = run(place / "c.jsonl", "--verifier", place / "verifier", "--rows", "2")
    assert "row 1: " in out
    assert "row 3" not in out
    assert "<|im_start|>assistant\n«The number is 0, and 0 it is.<|im_end|>»\n" in out
    cut = run(place / "c.jsonl", "--verifier", place / "verifier", "--rows", "1", "--max-seq-len", "20")
    assert "row 1: 20 tokens, 0 trained on\nleft out: answer_cut_off" in cut
    out = run(place / "c.jsonl", "--verifier", place / "verifier", "--row", "13")
    assert "\\x1b[31mred" in out, "a row must not steer the terminal"
    assert "row 14" in out
    assert "left out: not_a_row: an array where an object is meant" in out
    assert "no line 15" in refused(place / "c.jsonl", "--verifier", place / "verifier", "--row", "15")
    assert "--verifier" in refused(place / "c.jsonl")
    assert "d.jsonl is missing" in refused(place / "d.jsonl")


def test_tokens_that_are_none_are_told_as_prepare_tells_them(place: Path) -> None:
    rows = [{"input_ids": [1, token, 3], "loss_mask": [0, 1, 1]} for token in (tiny.VOCAB, 1 << 40)]
    (place / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = run(place / "t.jsonl", "--verifier", place / "verifier")
    assert out.count("left out: token_outside_vocabulary") == 2
    store = tiny.make_store(place / "store", place / "verifier", rows=1)
    tiny.spoil_shard(store, 0, lambda tensors: tensors["token_ids"].fill_(-7))
    assert "damaged: -7 is no token id" in run(store)


def test_a_prepared_directory_and_a_store(place: Path) -> None:
    out = place / "out"
    out.mkdir()
    wanted = {"verifier": str(place / "verifier"), "conversations": str(place / "c.jsonl"), "draft_vocab_size": 64}
    events = EventWriter(place / "events.jsonl")
    prepare.run(StageContext("job", PrepareParams(**wanted, max_bad_rows=1), out, events, place))
    events.close()
    shown = run(out, "--row", "3", "--rows", "1")
    assert "«The number is 3, and 3 it is.<|im_end|>»" in shown
    assert "row 4" not in shown
    assert "has no row 13" in refused(out, "--row", "13")
    rows = load_file(out / "rows.safetensors")
    whole = (out / "rows.safetensors").read_bytes()
    save_file(rows | {"loss_mask": rows["loss_mask"][:-5].clone()}, out / "rows.safetensors")
    assert "prepare again" in " ".join(refused(out).split())
    (out / "rows.safetensors").write_bytes(whole)
    store = tiny.make_store(place / "store", place / "verifier", rows=3)
    [first, second] = json.loads(run(store, "--row", "1", "--json"))["rows"]
    assert (first["row"], first["tokens"], first["supervised"]) == (1, 24, 12)
    assert [trained for _, trained in second["parts"]] == [False, True]
    index = json.loads((store / "index.json").read_text())
    for entry, number in zip((row for shard in index["shards"] for row in shard["rows"]), (4, 2, 7), strict=True):
        entry["row"] = number
    (store / "index.json").write_text(json.dumps(index))
    rows = json.loads(run(store, "--row", "3", "--json"))["rows"]
    assert [row["row"] for row in rows] == [4, 7], "numbered as prepared, whatever the order they lie in"
    assert rows[0]["parts"] != first["parts"] and rows[1]["parts"] == second["parts"]
    (place / "verifier" / "tokenizer_config.json").write_text("{}")
    assert "was made with another tokenizer" in refused(store)
    assert "neither prepared.json nor index.json" in refused(place / "verifier")


def test_what_the_daemon_asks_is_short_and_json(place: Path, capsys: Any) -> None:
    long = {"messages": [{"role": "user", "content": "x" * 9000}, {"role": "assistant", "content": "y" * 9000}]}
    (place / "long.jsonl").write_text(json.dumps(long) + "\n")
    assert preview.main([str(place / "verifier"), str(place / "long.jsonl"), "50000"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert (row["row"], row["left_out"]) == (1, None)
    assert row["tokens"] > 18_000
    assert len(json.dumps(row)) < 3_000
    assert preview.main([str(place / "verifier"), str(place / "long.jsonl"), "100"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["left_out"] == "answer_cut_off"
    assert preview.main([str(place / "verifier"), str(place / "none.jsonl"), "100"]) == 2
    assert "none.jsonl is missing" in capsys.readouterr().err
