"""prepare as a stage: what it keeps, what it leaves out and says, and that memory and kills leave no trace."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.vocab import measure
from eagle3_core.contract.jobdir import JobDir
from eagle3_core.contract.params import PrepareParams
from eagle3_core.contract.spec import JobSpec
from eagle3_core.data.prepared import load_prepared
from eagle3_core.errors import BadData, BadInput, BadRow
from eagle3_core.model.vocab_map import load_vocab_map
from tests import tiny
from tests.cases import make_case
from tests.killed import outputs_at_kills
from tests.unit.core.test_stages import Bench, bench, files_up_to
from worker.hugging_face import HuggingFaceTokenizer

__all__ = ["bench"]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def talk(*contents: str) -> dict[str, Any]:
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]}


def prepare(bench: Bench, conversations: Path, **params: Any) -> dict[str, Any]:
    wanted = {"verifier": bench.verifier, "conversations": conversations, "draft_vocab_size": 64}
    return bench.run("prepare", **{**wanted, **params}).data


def report_of(bench: Bench) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((bench.out / "report.json").read_text())
    return report


def test_mixed_rows_are_kept_in_their_order_and_the_rest_is_told_by_line(bench: Bench) -> None:
    tokenised = {"input_ids": [*range(10, 20)], "loss_mask": [0] * 5 + [1] * 5}
    sharegpt = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    odd = {"messages": [{"role": "narrator", "content": "x"}, *talk("a", "b")["messages"]]}
    system = {"messages": [{"role": "system", "content": "be kind"}]}
    source = write(bench.root / "c.jsonl", talk("hi", "hello"), odd, tokenised, system, sharegpt, talk("hi", ""), odd)
    data = prepare(bench, source)
    manifest, rows = load_prepared(bench.out)
    assert manifest.lines == [1, 3, 5]
    assert rows[1].token_ids_T.tolist() == tokenised["input_ids"]
    assert rows[1].loss_mask_T.tolist() == [False] * 5 + [True] * 5
    assert data["dropped"] == {"nothing_to_train": 2, "answer_cut_off": 0, "unknown_role": 2}
    report = report_of(bench)
    assert report == data["report"]
    assert (report["rows_read"], report["rows_kept"]) == (7, 3)
    assert report["dropped"]["unknown_role"]["lines"] == [2, 7]
    assert report["dropped"]["unknown_role"]["example"].startswith("line 2: message 1 is by 'narrator'")
    assert report["dropped"]["nothing_to_train"]["lines"] == [4, 6]
    assert bench.warned() == ["rows_dropped_unknown_role", "rows_dropped_nothing_to_train"]
    assert "2 of 7 conversations were left out: lines 2, 7" in bench.events("warning")[0]["message"]


def test_damaged_lines_end_the_job_unless_so_many_are_allowed(bench: Bench) -> None:
    source = bench.root / "c.jsonl"
    good = json.dumps(talk("hi", "hello")).encode()
    source.write_bytes(b"\n".join([good, good[:-9], b'{"a": "\xff"}', good]))
    with pytest.raises(BadData, match=r"c.jsonl, line 2: not JSON .* max_bad_rows, now 0,"):
        prepare(bench, source)
    assert not list(bench.out.iterdir())
    with pytest.raises(BadData, match=r"c.jsonl, line 3: not UTF-8 at byte 7; 2 such lines so far"):
        prepare(bench, source, max_bad_rows=1)
    data = prepare(bench, source, max_bad_rows=2)
    assert data["rows"] == 2
    assert report_of(bench)["damaged"]["not_utf8"] == {
        "count": 1, "lines": [3], "example": "line 3: not UTF-8 at byte 7"
    }  # fmt: skip
    assert bench.warned() == ["rows_dropped_not_json", "rows_dropped_not_utf8"]


def test_tokens_that_the_verifier_does_not_have_are_damage(bench: Bench) -> None:
    for token in (tiny.VOCAB, 1 << 40):
        row = {"input_ids": [1, token, 3], "loss_mask": [0, 1, 1]}
        with pytest.raises(BadRow, match=f"line 1: token {token}, the verifier's vocabulary ends at 258"):
            prepare(bench, write(bench.root / "c.jsonl", row))


def test_case_c01_rows_without_anything_to_train_on(bench: Bench) -> None:
    case = make_case("C01", bench.root)
    with pytest.raises(BadData, match=r"none of 4 conversations has an answer to train on .*: nothing_to_train 4"):
        prepare(bench, case / "all.jsonl")
    assert prepare(bench, case / "one.jsonl")["rows"] == 3
    assert bench.warned() == ["rows_dropped_nothing_to_train"]


def test_case_c02_a_template_without_tags_is_masked_exactly_and_none_at_all_refused(bench: Bench) -> None:
    case = make_case("C02", bench.root)
    (bench.verifier / "chat_template.jinja").unlink()
    for name in ("no_tags", "no_template"):
        (bench.verifier / "tokenizer_config.json").write_bytes((case / name / "tokenizer_config.json").read_bytes())
        if name == "no_template":
            with pytest.raises(BadInput, match="the tokenizer has no chat template"):
                prepare(bench, case / "data.jsonl")
            continue
        prepare(bench, case / "data.jsonl")
        [row] = load_prepared(bench.out)[1]
        tokenizer = HuggingFaceTokenizer(bench.verifier)
        assert tokenizer.decode(row.token_ids_T[row.loss_mask_T].tolist()) == "four<|im_end|>"


def test_case_a09_every_token_that_ends_a_text_is_kept(bench: Bench) -> None:
    case = make_case("A09", bench.root)
    config = bench.verifier / "config.json"
    told = {name: json.loads((case / "config.json").read_text())[name] for name in ("eos_token_id", "bos_token_id")}
    config.write_text(json.dumps(json.loads(config.read_text()) | told))
    (bench.verifier / "generation_config.json").write_bytes((case / "generation_config.json").read_bytes())
    prepare(bench, bench.conversations, draft_vocab_size=30)
    assert {2, 5, 9, 258} <= set(load_vocab_map(bench.out).target_ids_D.tolist())
    assert bench.warned() == []


def test_case_c03_every_row_is_kept_or_has_a_reason(bench: Bench) -> None:
    source = make_case("C03", bench.root) / "data.jsonl"
    ids = [json.loads(line)["id"] for line in source.read_text().splitlines()]
    prepare(bench, source)
    report = report_of(bench)
    left_out = {ids[line - 1]: reason for reason, entry in report["dropped"].items() for line in entry["lines"]}
    assert left_out == {
        "tools": "tool_calls_not_rendered",  # the tiny template knows none
        "system_only": "nothing_to_train",
        "empty_answer": "nothing_to_train",
        "odd_role": "unknown_role",
        "long": "answer_cut_off",
        "no_turns": "nothing_to_train",
    }
    assert [ids[line - 1] for line in load_prepared(bench.out)[0].lines] == [
        "empty_calls", "starts_assistant", "two_users", "mixed_keys", "sharegpt"
    ]  # fmt: skip


def test_case_c04_an_answer_that_is_cut_off(bench: Bench) -> None:
    case = make_case("C04", bench.root)
    limit = json.loads((case / "job.json").read_text())["max_length"]
    data = prepare(bench, case / "data.jsonl", max_seq_len=limit)
    assert (data["rows"], data["dropped"]["answer_cut_off"]) == (1, 2), "one supervised token alone trains no row"
    report = report_of(bench)
    assert report["dropped"]["answer_cut_off"]["lines"] == [2, 3]
    assert load_prepared(bench.out)[1][0].loss_mask_T.sum() == 10


def test_case_c06_a_doubled_begin_is_told_by_line(bench: Bench) -> None:
    case = make_case("C06", bench.root)
    config = bench.verifier / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | json.loads((case / "config.json").read_text())))
    assert prepare(bench, case / "data.jsonl")["rows"] == 2
    assert bench.warned() == ["doubled_bos"]
    assert bench.events("warning")[0]["message"].endswith("lines 2")


def test_rows_that_are_trained_on_whole_are_told(bench: Bench) -> None:
    prepare(bench, write(bench.root / "c.jsonl", {"input_ids": [1, 2, 3], "loss_mask": [1, 1, 1]}))
    assert bench.warned() == ["all_trained"]


def test_rows_that_were_tokenised_need_no_chat_template(bench: Bench) -> None:
    (bench.verifier / "chat_template.jinja").unlink()
    row = {"input_ids": [*range(9)], "loss_mask": [0] * 4 + [1] * 5}
    assert prepare(bench, write(bench.root / "c.jsonl", row))["rows"] == 1


def test_the_draft_vocabulary_counts_answers_alone_and_keeps_control_tokens(bench: Bench) -> None:
    row = {"input_ids": [7, 7, 7, 9, 9, 5, 257], "loss_mask": [0, 0, 0, 1, 1, 1, 1]}
    prepare(bench, write(bench.root / "c.jsonl", row), draft_vocab_size=4)
    vocab_map = load_vocab_map(bench.out)
    assert vocab_map.target_ids_D.tolist() == [5, 9, 257, 258]
    assert vocab_map.counts_V.nonzero()[:, 0].tolist() == [5, 9, 257]


def test_a_prepared_row_is_the_same_as_the_library_gives(bench: Bench) -> None:
    """Batches, and the file written in parts, change nothing: ids are those of the tokenizer for the rendered text."""
    rows = [talk(f"number {n}?", "x" * (n % 50) + " 🦅" * (n % 3) + "\n") for n in range(700)]
    prepare(bench, write(bench.root / "c.jsonl", *rows))
    tokenizer = HuggingFaceTokenizer(bench.verifier).inner
    prepared = load_prepared(bench.out)[1]
    assert len(prepared) == len(rows)
    for row, kept in zip(rows, prepared, strict=True):
        whole = tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=False)
        assert kept.token_ids_T.tolist() == whole
        answer = tokenizer.decode(kept.token_ids_T[kept.loss_mask_T])
        assert answer == row["messages"][1]["content"] + "<|im_end|>"


def test_a_full_disk_is_named_by_file_and_leaves_nothing(bench: Bench) -> None:
    source = write(bench.root / "c.jsonl", *(talk(f"number {n}?", f"{n} " * 100) for n in range(300)))
    for size in (3_000, 300_000):
        with files_up_to(size), pytest.raises(OSError, match=r"too large: '\S*/out/rows.safetensors'"):
            prepare(bench, source)
        assert not list(bench.out.iterdir())


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """The peak of a process that prepares four times as much as another."""
    verifier = tiny.make_verifier(tmp_path / "verifier")
    peaks = []
    for rows in (4_000, 16_000):
        source = write(tmp_path / f"{rows}.jsonl", *(talk(f"number {n}?", f"{n} " * 200) for n in range(rows)))
        job = JobDir(tmp_path / f"job-{rows}")
        attempt = job.attempt(1)
        attempt.path.mkdir(parents=True)
        params = PrepareParams(verifier=str(verifier), conversations=str(source), draft_vocab_size=64)
        spec = JobSpec(job_id=job.path.name, name="prepare", stage="prepare", params=params)
        job.spec.write_text(spec.model_dump_json())
        with attempt.log.open("wb") as log:
            command = [sys.executable, "-P", "-m", "worker.run", str(attempt.path)]
            process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        peaks.append(usage.ru_maxrss)
    tokens = load_prepared(job.artifacts)[0].tokens
    assert tokens > 16_000 * 700
    assert peaks[1] - peaks[0] < 48 << 10, "KiB; the ids alone would take 96 MiB as a list"


@pytest.mark.parametrize("kills", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_any_moment_and_started_again_it_gives_the_same_files(tmp_path: Path, kills: int) -> None:
    verifier = tiny.make_verifier(tmp_path / "verifier")
    source = write(tmp_path / "c.jsonl", *(talk(f"number {n}?", f"{n} " * 100) for n in range(1_000)))
    params = PrepareParams(verifier=str(verifier), conversations=str(source), draft_vocab_size=64)
    there = outputs_at_kills(tmp_path, "prepare", params, kills)
    assert any(name.endswith(".tmp") for names in there for name in names), "no kill came in the middle of the work"


def test_the_benchmark_of_the_vocabulary_map_measures_it() -> None:

    figures = measure(vocab_size=5_000, tokens=100_000)
    assert figures["supervised"] == 100_000
    assert 0.5 < figures["coverage"] < 1
