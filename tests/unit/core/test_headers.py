"""Strict safetensors headers: what is refused, and with which words."""

import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file

from eagle3_core.contract.headers import MAX_HEADER_BYTES, read_header
from eagle3_core.errors import UnreadableFile
from tests.cases import make_case
from tests.makers import raw_file


def entry(offsets: object, shape: object = (4,), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": offsets}


def fault(path: Path) -> UnreadableFile:
    with pytest.raises(UnreadableFile) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    return caught.value


def test_a_good_file_is_read_with_absolute_offsets(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {"w": torch.arange(6).reshape(2, 3), "b": torch.ones(2).bfloat16(), "none": torch.empty(0, 3)}
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    assert header.metadata == {"format": "pt"}
    assert header.size == path.stat().st_size
    assert {name: (info.dtype, info.shape) for name, info in header.tensors.items()} == {
        "w": ("I64", (2, 3)),
        "b": ("BF16", (2,)),
        "none": ("F32", (0, 3)),
    }
    info = header.tensors["w"]
    assert path.read_bytes()[info.start : info.end] == tensors["w"].numpy().tobytes()


def test_a_header_that_begins_like_a_pickle_is_no_pickle(tmp_path: Path) -> None:
    header = b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}'
    path = raw_file(tmp_path / "a.safetensors", header + b" " * (0x280 - len(header)), b"\1")
    assert path.read_bytes()[:2] == b"\x80\x02"
    assert read_header(path).tensors["a"].shape == (1,)


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (b"", "empty", "0 bytes"),
        (b"\x10\0\0\0", "too_short", "4 bytes"),
        (struct.pack("<Q", 2**63) + b"{}", "header_length", "9,223,372,036,854,775,808"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "header_length", "limit"),
        (struct.pack("<Q", 500) + b'{"a": 1}', "header_length", "byte 508, the file has 16"),
        (struct.pack("<Q", 8) + b'{"a": {,', "bad_json", "not JSON"),
        (struct.pack("<Q", 8) + b"[1, 2]  ", "bad_json", "not a JSON object"),
        (struct.pack("<Q", 9) + b'{"\xff\xfe":1}  ', "bad_utf8", "UTF-8"),
        (struct.pack("<Q", 2) + b"{}", "no_tensors", "no tensors"),
        (struct.pack("<Q", 9) + b'{"a":NaN}', "bad_json", "NaN"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "lfs_pointer", "LFS pointer"),
        (pickle.dumps({"a": 1}), "pickle", "pickle"),
        (b"PK\x03\x04" + bytes(60), "zip", "zip"),
        (b"GGUF" + bytes(60), "gguf", "GGUF"),
        (b"<!DOCTYPE html><html></html>", "html", "web page"),
        (struct.pack("<Q", 40_000) + b"{" * 40_000, "bad_json", "not JSON"),
        (struct.pack("<Q", 40_000) + b'{"a":' + b"[" * 39_995, "bad_json", "not JSON"),
    ],
)
def test_what_is_no_safetensors_file_is_named(tmp_path: Path, content: bytes, kind: str, words: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    error = fault(path)
    assert error.kind == kind
    assert words in str(error)


@pytest.mark.parametrize(
    ("header", "size", "kind", "tensor"),
    [
        ({"k": entry([0, 16]), "v": entry([0, 16])}, 16, "overlap", "v"),
        ({"k": entry([0, 16]), "v": entry([8, 24])}, 24, "overlap", "v"),
        ({"a": entry([0, 16]), "b": entry([20, 36])}, 36, "hole", "b"),
        ({"a": entry([4, 20])}, 20, "hole", "a"),
        ({"a": entry([16, 0])}, 16, "reversed", "a"),
        ({"a": entry([-16, 0])}, 16, "negative", "a"),
        ({"a": entry([0, 16], (1000, 1000))}, 16, "shape_mismatch", "a"),
        ({"a": entry([0, 16], (2**62, 8))}, 16, "overflow", "a"),
        ({"a": entry([0, 0], (0, 2**70))}, 0, "overflow", "a"),
        ({"a": entry([0, 16], (4,), "X99")}, 16, "unknown_dtype", "a"),
        ({"a": entry([0, 16], (4,), 7)}, 16, "unknown_dtype", "a"),
        ({"a": entry([0])}, 16, "bad_offsets", "a"),
        ({"a": entry([0.0, 16.0])}, 16, "bad_offsets", "a"),
        ({"a": entry([False, 16])}, 16, "bad_offsets", "a"),
        ({"a": entry([0, 16], (-4, -1))}, 16, "bad_shape", "a"),
        ({"a": entry([0, 16], "4")}, 16, "bad_shape", "a"),
        ({"a": entry([0, 16], (True, 4))}, 16, "bad_shape", "a"),
        ({"a": entry([0, 3], (5,), "F4")}, 3, "shape_mismatch", "a"),
        ({"a": [0, 16]}, 16, "bad_header", "a"),
        ({"a": entry([0, 16])}, 9, "cut", "a"),
        ({"a": entry([0, 16])}, 21, "trailing_bytes", "a"),
        ({"__metadata__": {"n": 1}, "a": entry([0, 16])}, 16, "bad_header", None),
    ],
)
def test_a_header_that_lies_is_refused_and_the_tensor_named(
    tmp_path: Path, header: dict[str, object], size: int, kind: str, tensor: str | None
) -> None:
    error = fault(raw_file(tmp_path / "m.safetensors", header, bytes(size)))
    assert (error.kind, error.tensor) == (kind, tensor)
    assert tensor is None or repr(tensor) in str(error)


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    one = b'"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}'
    error = fault(raw_file(tmp_path / "m.safetensors", b"{" + one + b", " + one + b"}", b"\1"))
    assert error.kind == "duplicate_key"
    assert "'a'" in str(error)


def test_trailing_bytes_are_not_called_truncated(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(4)}, path)
    path.write_bytes(path.read_bytes() + b"extra")
    assert "5 bytes after the last tensor" in str(fault(path))
    assert "cut" not in str(fault(path))


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.safetensors")
    (tmp_path / "dir.safetensors").mkdir()
    assert fault(tmp_path / "fifo.safetensors").kind == "not_a_file"
    assert fault(tmp_path / "dir.safetensors").kind == "not_a_file"
    assert fault(tmp_path / "absent.safetensors").kind == "missing"


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_is_either_refused_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever is accepted, the reference reader loads to the same names and shapes."""
    content = bytearray(save({"a": torch.ones(2, 3), "b": torch.zeros(5, dtype=torch.int64)}))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    try:
        header = read_header(path)
    except UnreadableFile:
        return
    try:
        loaded = load_file(path)
    except (SafetensorError, KeyError, AttributeError, UnicodeDecodeError):
        return
    assert {name: info.shape for name, info in header.tensors.items()} == {n: tuple(t.shape) for n, t in loaded.items()}


@pytest.mark.parametrize("case", ["A13", "G01", "G02", "G03"])
def test_published_broken_files_are_all_refused(tmp_path: Path, case: str) -> None:
    files = sorted(make_case(case, tmp_path).rglob("*.safetensors"))
    assert files
    for file in files:
        fault(file)
