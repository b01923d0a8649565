"""Headers of safetensors files: strict reading, one rule for every file Eyas opens; and writing. Standard library only.

    bytes 0..7              header length n, little endian
    bytes 8..8+n            JSON: {"__metadata__": {str: str}, name: {"dtype", "shape", "data_offsets": [start, end]}}
    bytes 8+n..             the tensors, back to back: no hole, no overlap, nothing after the last

Source: the safetensors format and the checks of its reference reader (MAX_HEADER_SIZE 100 MB, contiguous offsets).
"""

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from eagle3_core.contract.jsonfiles import LFS_POINTER, not_there, repeated_key
from eagle3_core.errors import UnreadableFile

MAX_HEADER_BYTES = 100_000_000
"""A longer header is refused, as the reference reader does."""

_MAX_COUNT = 2**63 - 1
_MAX_DIMENSIONS = 64
"""As many as torch has."""

DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}
"""Bits per element of every dtype the format knows."""

_OTHER_FORMATS: tuple[tuple[bytes, str, str], ...] = (
    (LFS_POINTER, "lfs_pointer", "is a Git LFS pointer, not the weights; run `git lfs pull`"),
    (b"PK\x03\x04", "zip", "is a zip archive (a torch.save file?) named .safetensors; convert it to safetensors"),
    (b"GGUF", "gguf", "is a GGUF file, not safetensors"),
    (b"\x89HDF", "hdf5", "is an HDF5 file, not safetensors"),
    (b"\x80\x02", "pickle", "is a pickle named .safetensors; it was not opened"),
    (b"\x80\x03", "pickle", "is a pickle named .safetensors; it was not opened"),
    (b"\x80\x04", "pickle", "is a pickle named .safetensors; it was not opened"),
    (b"\x80\x05", "pickle", "is a pickle named .safetensors; it was not opened"),
    (b"<!DOC", "html", "is a web page, not weights; the download went wrong"),
    (b"<html", "html", "is a web page, not weights; the download went wrong"),
    (b"<?xml", "html", "is an XML answer, not weights; the download went wrong"),
)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file; `start` and `end` are byte offsets from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class TensorFile:
    """What the header of one safetensors file says, checked against the file."""

    path: Path
    data_start: int
    size: int
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def read_header(path: Path) -> TensorFile:
    """The checked header of a safetensors file; reads no tensor.

    Raises:
        UnreadableFile: the file is missing, not a regular file, another format, cut short, too long, or its header
            lies; the message names path, kind of fault, expected and real size, and the tensor where there is one.
    """
    raw, size = _header_bytes(path)
    header = _parse(path, raw)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise UnreadableFile(path, "bad_header", "__metadata__ in the header is not an object of strings")
    if not header:
        raise UnreadableFile(path, "no_tensors", "no tensors: the header holds metadata only")
    data_start = 8 + len(raw)
    tensors = {name: _tensor(path, name, entry, data_start) for name, entry in header.items()}
    _check_layout(path, tensors, data_start, size)
    return TensorFile(path, data_start, size, tensors, metadata)


def _header_bytes(path: Path) -> tuple[bytes, int]:
    """The JSON part of the header and the size of the file."""
    try:
        # A FIFO must not hang the open; O_NONBLOCK does nothing to regular files.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise UnreadableFile(path, "missing", not_there(path)) from error
    except OSError as error:
        raise UnreadableFile(path, "unreadable", f"cannot be opened: {error.strerror}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise UnreadableFile(path, "not_a_file", "is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        length = _header_length(path, file.read(8 + 32), status.st_size)
        file.seek(8)
        raw = file.read(length)
        if len(raw) != length:
            raise UnreadableFile(path, "cut", f"cut short: header says {length:,} bytes, {len(raw):,} could be read")
        return raw, status.st_size


def _header_length(path: Path, head: bytes, size: int) -> int:
    if size == 0:
        raise UnreadableFile(path, "empty", "empty file (0 bytes)")
    length = int.from_bytes(head[:8], "little")
    # A header of 640 bytes begins like a pickle (80 02 00 ...), so the magic counts only where no header follows.
    if length > MAX_HEADER_BYTES or 8 + length > size or head[8:9] != b"{":
        for magic, kind, message in _OTHER_FORMATS:
            if head.startswith(magic):
                raise UnreadableFile(path, kind, f"{message} ({size:,} bytes)")
    if size < 8:
        raise UnreadableFile(path, "too_short", f"too short: {size} bytes, a safetensors file has at least 8")
    if length > MAX_HEADER_BYTES:
        raise UnreadableFile(
            path,
            "header_length",
            f"not a safetensors file: its header length reads {length:,} bytes, over the limit of "
            f"{MAX_HEADER_BYTES:,}; the file has {size:,} bytes",
        )
    if 8 + length > size:
        raise UnreadableFile(
            path,
            "header_length",
            f"cut short or damaged: the header ends at byte {8 + length:,}, the file has {size:,} bytes",
        )
    return length


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableFile(path, "bad_utf8", f"the header is not UTF-8 (byte {8 + error.start})") from error
    if not text.startswith("{"):
        raise UnreadableFile(path, "bad_json", "the header is not a JSON object")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if (twice := repeated_key(pairs)) is not None:
            raise UnreadableFile(path, "duplicate_key", f"the header holds the key {twice!r} twice", twice)
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise UnreadableFile(path, "bad_json", f"the header holds {constant}, which is not JSON")

    try:
        header = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except UnreadableFile:
        raise
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(path, "bad_json", f"the header is not JSON: {error}") from error
    assert isinstance(header, dict)
    return header


def _tensor(path: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    """One entry of the header, every field checked on its own."""

    def fault(kind: str, message: str) -> UnreadableFile:
        return UnreadableFile(path, kind, f"tensor {name!r}: {message}", name)

    if not isinstance(entry, dict):
        raise fault("bad_header", "its entry in the header is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise fault("unknown_dtype", f"unknown dtype {dtype!r:.80}")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise fault("bad_shape", f"shape {shape!r:.80} is not a list of sizes")
    if len(shape) > _MAX_DIMENSIONS:
        raise fault("bad_shape", f"{len(shape):,} dimensions, {_MAX_DIMENSIONS} are known")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(offset) is int for offset in offsets):
        raise fault("bad_offsets", f"data_offsets {offsets!r:.80} are not two integers")
    start, end = offsets
    if min(offsets) < 0 or end < start:
        kind = "negative" if min(offsets) < 0 else "reversed"
        raise fault(kind, f"data_offsets {offsets} are {kind}")
    bits = prod(shape) * DTYPE_BITS[dtype]
    if bits > _MAX_COUNT or end > _MAX_COUNT or max(shape, default=0) > _MAX_COUNT:
        raise fault("overflow", f"shape {shape} of {dtype} overflows 64 bits; its offsets hold {end - start:,} bytes")
    if bits != 8 * (end - start):
        needed = f"{bits // 8:,}" if bits % 8 == 0 else f"{bits / 8}"
        raise fault(
            "shape_mismatch", f"shape {shape} of {dtype} needs {needed} bytes, its offsets hold {end - start:,}"
        )
    return TensorInfo(dtype, tuple(shape), data_start + start, data_start + end)


def _check_layout(path: Path, tensors: dict[str, TensorInfo], data_start: int, size: int) -> None:
    """All tensors together fill the file from the header to its last byte."""
    position, before = data_start, "the header"
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start < position:
            raise UnreadableFile(
                path, "overlap", f"tensor {name!r} overlaps {before!r} by {position - info.start:,} bytes", name
            )
        if info.start > position:
            raise UnreadableFile(
                path, "hole", f"a hole of {info.start - position:,} bytes between {before!r} and tensor {name!r}", name
            )
        if info.end > size:
            raise UnreadableFile(
                path,
                "cut",
                f"cut short: tensor {name!r} ends at byte {info.end:,}, the file has {size:,} bytes "
                f"({max(other.end for other in tensors.values()):,} expected)",
                name,
            )
        position, before = info.end, name
    if position != size:
        raise UnreadableFile(
            path,
            "trailing_bytes",
            f"{size - position:,} bytes after the last tensor {before!r}: {position:,} bytes expected, {size:,} found",
            before,
        )


def header_bytes(tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str] | None = None) -> bytes:
    """What stands before the tensors in a file that is written piece by piece, padded so that they are aligned.

    Args:
        tensors: dtype as safetensors spells it and shape by name, in the order their bytes follow.
        metadata: of the file, besides what transformers asks for.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + prod(shape) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
