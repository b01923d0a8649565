"""A safetensors file from pieces of other files: bytes are copied, never loaded as tensors; memory does not grow.

The file is laid out first, header and room for every tensor, so that a full disk is met before the copying; then each
tensor is filled in.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path

import torch

from eagle3_core.checkpoint.stream import PIECE_BYTES, Stream
from eagle3_core.checkpoint.tensors import load_view
from eagle3_core.checkpoint.weights import Entry
from eagle3_core.contract.headers import DTYPE_BITS, header_bytes
from eagle3_core.errors import UnreadableFile

Piece = bytes | bytearray | memoryview


@dataclass(frozen=True)
class RawTensor:
    """A tensor to be written: dtype as safetensors spells it, shape, and its bytes in order."""

    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[Stream], Iterator[Piece]]

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8


def made(dtype: str, values: bytes, count: int) -> RawTensor:
    """A vector from bytes in memory."""
    return RawTensor(dtype, (count,), lambda _: iter((values,)))


def copied(entry: Entry, rows: int | None = None) -> RawTensor:
    """A tensor as it is, or the first `rows` rows of it."""
    shape = entry.shape if rows is None else (rows, *entry.shape[1:])
    if entry.location is None:
        return RawTensor(entry.dtype, shape, lambda _: _unordered(entry, range(shape[0])))
    start, size = entry.location.info.start, prod(shape) * DTYPE_BITS[entry.dtype] // 8

    def pieces(stream: Stream) -> Iterator[Piece]:
        with stream.opened(entry.file) as file:
            yield from file.pieces(start, start + size)

    return RawTensor(entry.dtype, shape, pieces)


def permuted(entry: Entry, order: Sequence[int]) -> RawTensor:
    """Rows of a matrix, in the order asked for."""
    location, shape = entry.location, (len(order), *entry.shape[1:])
    if location is None:
        return RawTensor(entry.dtype, shape, lambda _: _unordered(entry, order))
    start, row_bytes = location.info.start, (location.info.end - location.info.start) // entry.shape[0]
    step = max(1, PIECE_BYTES // row_bytes)

    def pieces(_: Stream) -> Iterator[Piece]:
        with entry.file.open("rb", buffering=0) as file:
            for first in range(0, len(order), step):
                rows = order[first : first + step]
                out = bytearray(len(rows) * row_bytes)
                for place, row in enumerate(rows):
                    view = memoryview(out)[place * row_bytes : (place + 1) * row_bytes]
                    if os.preadv(file.fileno(), [view], start + row * row_bytes) != row_bytes:
                        raise UnreadableFile(entry.file, "cut", f"ended inside tensor {entry.stored_name!r}")
                yield out

    return RawTensor(entry.dtype, shape, pieces)


def lay_out(path: Path, tensors: Mapping[str, RawTensor]) -> dict[str, int]:
    """Write the header and reserve the room; returns where each tensor begins.

    Raises:
        OSError: there is no room for it.
    """
    header = header_bytes({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
    starts = list(accumulate((tensor.size for tensor in tensors.values()), initial=len(header)))
    with path.open("xb") as file:
        file.write(header)
        file.flush()
        if starts[-1] > len(header):
            os.posix_fallocate(file.fileno(), len(header), starts[-1] - len(header))
    return dict(zip(tensors, starts, strict=False))


def fill(
    path: Path,
    tensors: Mapping[str, RawTensor],
    starts: Mapping[str, int],
    stream: Stream,
    check_stop: Callable[[], None],
) -> None:
    """Write every tensor where `lay_out` put it; `check_stop` is called before each piece.

    Raises:
        OSError: it cannot be written.
        UnreadableFile: a source ended early or changed its size.
    """
    with path.open("r+b", buffering=0) as file:
        for name, tensor in tensors.items():
            file.seek(starts[name])
            for piece in tensor.pieces(stream):
                check_stop()
                view = memoryview(piece)
                while view:
                    view = view[file.write(view) :]
            if file.tell() != starts[name] + tensor.size:
                raise UnreadableFile(path, "cut", f"tensor {name!r} came with another size than its header says", name)
        os.fsync(file.fileno())


def _unordered(entry: Entry, order: Sequence[int]) -> Iterator[Piece]:
    """Rows of a tensor of torch.save whose elements do not lie in order, some at a time."""
    tensor, rows = load_view(entry), torch.tensor(order)
    step = max(1, PIECE_BYTES // max(1, tensor[0].numel() * tensor.element_size()))
    for first in range(0, len(rows), step):
        part = tensor[rows[first : first + step]].contiguous()
        yield part.view(torch.uint8).numpy().tobytes()
