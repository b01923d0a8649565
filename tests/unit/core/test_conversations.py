"""Rows of data in every form, and every way they are found damaged: kept, or named with line and reason."""

import bz2
import gzip
import json
import lzma
import struct
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from eagle3_core.data.conversations import REASONING, Conversation, Row, Tokenised, parse_line, parse_row
from eagle3_core.errors import BadData, BadInput, BadRow
from tests.cases import make_case
from worker.conversation_files import ConversationFile, read_conversations

GOOD: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
LINE = json.dumps(GOOD).encode()


def messages_of(value: dict[str, Any]) -> list[dict[str, Any]]:
    row = parse_row(value)
    assert isinstance(row, Conversation)
    return row.messages


def found(path: Path) -> list[tuple[int, Row | BadRow]]:
    return list(ConversationFile(path).rows())


def faults(path: Path) -> list[tuple[int, str]]:
    return [(line, row.reason) for line, row in found(path) if isinstance(row, BadRow)]


@pytest.mark.parametrize(
    ("row", "roles", "contents"),
    [
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, "ua", ["q", "a"]),
        ({"conversations": [{"from": "human", "value": "q"}, GOOD["messages"][1]]}, "ua", ["q", "b"]),
        ({"conversations": [{"from": "human", "value": "q"}], "system": "s"}, "su", ["s", "q"]),
        ({"messages": [{"role": "Human", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
         "u", ["ab"]),
        ({"messages": GOOD["messages"], "conversations": None, "tools": []}, "ua", ["a", "b"]),
        ({"messages": GOOD["messages"], "conversations": []}, "ua", ["a", "b"]),
        ({"messages": [{"role": "assistant", "content": None, "reasoning": "r"}]}, "a", [""]),
        ({"messages": [{"role": "system", "content": "s"}, *GOOD["messages"]], "system": "s "}, "sua", ["s", "a", "b"]),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "bing", "value": "a"}]}, "ua", ["q", "a"]),
        ({"conversations": [{"from": "observation", "value": "4"}]}, "t", ["4"]),
    ],
)  # fmt: skip
def test_what_a_row_means(row: dict[str, Any], roles: str, contents: list[str]) -> None:
    messages = messages_of(row)
    assert "".join(message["role"][0] for message in messages) == roles
    assert [message["content"] for message in messages] == contents


def test_a_tool_call_has_its_arguments_as_an_object_however_it_was_written() -> None:
    wanted = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    for call in (
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {"a": 1}}]},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}},
    ):
        [message] = messages_of({"messages": [call]})
        assert (message["role"], message["content"], message["tool_calls"]) == ("assistant", "", wanted)


def test_what_was_thought_goes_by_every_name_templates_ask_for() -> None:
    for name in REASONING:
        [message] = messages_of({"messages": [{"role": "assistant", "content": "b", name: "r"}]})
        assert [message[other] for other in REASONING] == ["r"] * 3
    [message] = messages_of({"messages": [{"role": "assistant", "content": "b", "thinking": "r", "reasoning": "s"}]})
    assert "reasoning_content" not in message


def test_a_key_that_comes_again_at_the_end_of_many_is_found_in_linear_time() -> None:
    text = "{" + ", ".join(f'"{n}": 0' for n in range(200_000)) + ', "199999": 1}'
    started = time.process_time()
    with pytest.raises(BadRow, match="'199999' occurs twice"):
        parse_line(text.encode())
    assert time.process_time() - started < 20


def test_a_row_that_was_tokenised_before() -> None:
    assert parse_line(b'{"input_ids": [1, 2], "loss_mask": [0, true]}') == Tokenised([1, 2], b"\x00\x01")


@pytest.mark.parametrize(
    ("row", "reason", "words"),
    [
        ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown_role", "message 1 is by 'narrator'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "not_text", "part of type 'image'"),
        ({"messages": GOOD["messages"], "input_ids": [1]}, "ambiguous", "messages and input_ids"),
        ({"messages": [{"role": "system", "content": "a"}, *GOOD["messages"]], "system": "b"}, "ambiguous",
         "say different things"),
        ({**GOOD, "tools": "{"}, "bad_tools", "not JSON"),
        ({"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]}, "bad_weight", "`weight` is 0 or 1"),
        ({"messages": [{"role": "assistant", "content": "x", "train": "no"}]}, "bad_weight", "true or false"),
        ({**GOOD, "tools": ["add"]}, "bad_tools", "not a list of JSON schemas"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": ""}]}]}, "bad_tool_call", "a tool call is"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]}, "bad_tool_call",
         "arguments of a tool call are not JSON"),
        ({"messages": [{"from": "function_call", "value": "add(1)"}]}, "bad_tool_call", "is a tool call that is not"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_says_why(row: dict[str, Any], reason: str, words: str) -> None:
    with pytest.raises(BadRow, match=words) as error:
        parse_row(row)
    assert (error.value.reason, error.value.damaged) == (reason, False)


@pytest.mark.parametrize(
    ("line", "reason", "words"),
    [
        (b'{"messages": [{"role": "user"', "not_json", r"not JSON .*is the line cut, or the file no JSONL\?"),
        (b'{"messages": "\xff"}', "not_utf8", "not UTF-8 at byte 14"),
        (LINE.decode().encode("utf-16"), "not_utf8", "not UTF-8 at byte 0"),
        (b'{"messages": NaN}', "not_json", "NaN is not JSON"),
        (b'{"messages": [], "messages": []}', "duplicate_key", "'messages' occurs twice"),
        (b'{"messages": [{"role": "user", "role": "user"}]}', "duplicate_key", "'role' occurs twice"),
        (b"[" * 100_000, "not_json", "not JSON"),
        (b'{"input_ids": [' + b"1" * 5000 + b"]}", "not_json", "not JSON"),
        (b"[\n", "not_json", "one value over many lines"),
        (b"[]", "not_a_row", "an array where an object is meant"),
        (b"3", "not_a_row", "3 where an object is meant"),
        (b'{"text": "x"}', "not_a_row", "expected .*; it has the keys text"),
        (LINE + LINE, "not_json", "more than one value on the line"),
        (b'{"messages": [], "system": ["s"]}', "not_a_row", "`system` is .* not a text"),
        (b'{"messages": {}}', "not_a_row", "messages is not a list"),
        (b'{"messages": ["x"]}', "not_a_row", "message 1 is not an object"),
        (b'{"messages": [{"role": "user", "content": 3}]}', "not_a_row", "every message needs a text `content`"),
        (b'{"messages": [{"content": "x"}]}', "not_a_row", "every message needs a text `role`"),
        (b'{"input_ids": [1]}', "not_a_row", "loss_mask, which input_ids needs"),
        (b'{"input_ids": [1, 2], "loss_mask": [1]}', "not_a_row", "2 input_ids, 1 in loss_mask"),
        (b'{"input_ids": [1.5], "loss_mask": [1]}', "not_a_row", "not a list of token ids"),
        (b'{"input_ids": [-1], "loss_mask": [1]}', "not_a_row", "not a list of token ids"),
        (b'{"input_ids": [1], "loss_mask": [0.5]}', "not_a_row", "not a list of 0 and 1"),
    ],
)
def test_what_is_no_row_at_all_is_damaged(line: bytes, reason: str, words: str) -> None:
    with pytest.raises(BadRow, match=words) as error:
        parse_line(line)
    assert (error.value.reason, error.value.damaged) == (reason, True)


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    rows = [GOOD, {"conversations": [{"from": "human", "value": "q"}]}, {"input_ids": [1, 2], "loss_mask": [0, 1]}]
    data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    (tmp_path / "a.jsonl").write_bytes(data)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(data[:50]) + gzip.compress(data[50:]))
    frames = (zstandard.compress(part) for part in (data[:50], data[50:]))
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    columns: dict[str, Any] = dict.fromkeys(name for row in rows for name in row)
    table = pyarrow.Table.from_pylist([columns | row for row in rows])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "by-its-bytes").write_bytes(gzip.compress(data))
    wanted = [(number, parse_row(row)) for number, row in enumerate(rows, 1)]
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "by-its-bytes"):
        file = ConversationFile(tmp_path / name)
        places = [(line, row, file.position) for line, row in file.rows()]
        assert [place[:2] for place in places] == wanted, name
        assert 0 < places[-1][2] <= file.size


def test_rows_of_a_parquet_file_keep_the_keys_they_were_written_with(tmp_path: Path) -> None:
    """Its columns hold the keys of all rows: arguments and schemas of other tools are no nulls of this one."""

    def row(tool: str, argument: str) -> dict[str, Any]:
        call = {"function": {"name": tool, "arguments": {argument: 1}}}
        schema = {"name": tool, "parameters": {"properties": {argument: {"type": "integer"}}}}
        asked = {"role": "assistant", "content": None, "tool_calls": [call]}
        return {"messages": [GOOD["messages"][0], asked], "tools": [{"type": "function", "function": schema}]}

    rows = [row("add", "a"), row("halve", "whole")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [kept for _, kept in found(tmp_path / "a.parquet")] == [parse_row(row) for row in rows]


def test_a_parquet_row_that_cannot_be_decoded_is_named_and_other_columns_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    cut = struct.pack("<4i", 0, 1, 3, 4)
    texts = pyarrow.StringArray.from_buffers(3, pyarrow.py_buffer(cut), pyarrow.py_buffer(b"ab\xffc"))
    message = pyarrow.StructArray.from_arrays([pyarrow.array(["user"] * 3), texts], ["role", "content"])
    messages = pyarrow.ListArray.from_arrays(pyarrow.array([0, 1, 2, 3], pyarrow.int32()), message)
    odd_times = pyarrow.array([1] * 3, pyarrow.timestamp("ns"))  # which Python's own times cannot hold
    pyarrow.parquet.write_table(pyarrow.table({"messages": messages, "made": odd_times}), path)
    assert faults(path) == [(2, "not_utf8")]
    assert [line for line, row in found(path) if isinstance(row, Conversation)] == [1, 3]
    pyarrow.parquet.write_table(pyarrow.table({"made": odd_times}), path)
    with pytest.raises(BadData, match="no column is called messages, conversations, input_ids; there are made"):
        found(path)


def test_messages_may_be_a_json_text_as_in_tables_without_nested_columns(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(
        pyarrow.table({"messages": [json.dumps(GOOD["messages"]), "[{"]}), tmp_path / "a.parquet"
    )
    assert found(tmp_path / "a.parquet")[0] == (1, parse_row(GOOD))
    assert faults(tmp_path / "a.parquet") == [(2, "not_a_row")]


@pytest.mark.parametrize("compression", ["snappy", "zstd", "none"])
def test_damage_inside_a_parquet_file_is_named(tmp_path: Path, compression: str) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.Table.from_pylist([{"messages": [{"role": "user", "content": str(n) * 9}]} for n in range(2000)])
    pyarrow.parquet.write_table(table, path, compression=compression, write_page_checksum=True)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 8] = bytes(byte ^ 0x55 for byte in data[middle : middle + 8])
    path.write_bytes(data)
    with pytest.raises(BadData, match=r"a.parquet: damaged behind row \d+ \("):
        found(path)
    path.write_bytes(b"PARE" + data[4:-4] + b"PARE")
    with pytest.raises(BadData, match="or encrypted"):
        found(path)


@pytest.mark.parametrize(
    ("begin", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        ("\ufeff{".encode("utf-16-le"), "UTF-16"),
        (bz2.compress(LINE), "bzip2"),
        (lzma.compress(LINE), "an xz file"),
        (b"PK\x03\x04", "zip archive"),
        (b"<!DOCTYPE html>", "web page"),
    ],
)
def test_a_file_of_another_kind_is_called_by_its_name(tmp_path: Path, begin: bytes, words: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(begin)
    with pytest.raises(BadInput, match=rf"a\.jsonl: is .*{words}"):
        found(tmp_path / "a.jsonl")


def test_a_line_beyond_any_conversation_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.conversation_files.MAX_LINE_BYTES", 4096)
    (tmp_path / "a.jsonl").write_bytes(b"x" * 20_000 + b"\n" + LINE + b"\n" + b"x" * 5000)
    assert faults(tmp_path / "a.jsonl") == [(1, "too_long"), (3, "too_long")]
    assert found(tmp_path / "a.jsonl")[1] == (2, parse_row(GOOD))


@pytest.mark.parametrize("kind", ["gz", "zst", "parquet"])
def test_a_file_that_is_cut_says_so(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.jsonl.{kind}"
    lines = [json.dumps({**GOOD, "id": str(Path(str(n)).absolute()) * 40}) for n in range(3000)]
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([json.loads(line) for line in lines]), path)
    else:
        data = "\n".join(lines).encode()
        path.write_bytes(gzip.compress(data) if kind == "gz" else zstandard.compress(data))
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(BadData, match=r"a.jsonl.\w+: (the compressed data is damaged behind line \d+|not a Parquet)"):
        found(path)


def test_what_is_no_file_of_its_kind_says_so(tmp_path: Path) -> None:
    for name in ("a.gz", "a.zst", "a.parquet"):
        (tmp_path / name).write_bytes(LINE)
        with pytest.raises(BadData, match=f"{name}: "):
            found(tmp_path / name)
    with pytest.raises(BadInput, match="missing"):
        ConversationFile(tmp_path / "b.jsonl")
    with pytest.raises(BadInput, match="not a file"):
        ConversationFile(tmp_path)


def test_a_single_reader_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(LINE + b"\n\n[]\n")
    with pytest.raises(BadData, match=r"c.jsonl, line 3: an array"):
        list(read_conversations(path))


def test_case_c07_damaged_lines_are_named(tmp_path: Path) -> None:
    case = make_case("C07", tmp_path)
    wanted = {
        "bom": [],
        "crlf": [],
        "blank": [],
        "empty": [],
        "cut": [(2, "not_json")],
        "badutf8": [(2, "not_utf8")],
        "array": [(1, "not_a_row")],
        "nan": [(2, "not_json")],
        "dup": [(1, "duplicate_key")],
    }
    assert {path.stem: faults(path) for path in case.glob("*.jsonl")} == wanted
    for name in ("bom", "crlf", "blank"):
        rows = [row for _, row in found(case / f"{name}.jsonl")]
        assert rows == [parse_row(GOOD)] * 2
    assert [line for line, _ in found(case / "blank.jsonl")] == [1, 4]


def test_case_c03_roles_and_keys(tmp_path: Path) -> None:
    path = make_case("C03", tmp_path) / "data.jsonl"
    assert Counter(reason for _, reason in faults(path)) == {"unknown_role": 1}
    assert len(found(path)) == 11
