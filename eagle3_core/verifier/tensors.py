"""Single tensors of safetensors files, read by byte range: no other byte of a verifier is touched.

V verifier vocabulary, R wanted rows, H hidden.
"""

import hashlib
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eagle3_core.contract.verifier_files import VerifierFiles
from eagle3_core.contract.weight_files import TensorLocation
from eagle3_core.errors import BadInput, UnreadableFile

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""safetensors dtypes that torch can hold."""

FINGERPRINT_ROWS = 64

_READ_BYTES = 1 << 26
_GAP_BYTES = 1 << 12
"""Rows this close are read in one go: a short gap costs less than another system call."""


def load_tensor(location: TensorLocation) -> Tensor:
    """The tensor, on the CPU, in its own dtype; memory of its own.

    Raises:
        UnreadableFile: the file ended early or its dtype is unknown to torch.
    """
    info = location.info
    dtype = _torch_dtype(location)
    if info.count == 0:
        return torch.empty(info.shape, dtype=dtype)
    data = bytearray(info.end - info.start)
    with _opened(location.file) as descriptor:
        _read_into(descriptor, memoryview(data), info.start, location)
    return torch.frombuffer(data, dtype=dtype).reshape(info.shape)


def load_rows(location: TensorLocation, rows: Tensor) -> Tensor:
    """Some rows of a matrix, in the order asked for, reading little more than those rows.

    Args:
        location: a matrix [V, H].
        rows: int64 [R], each in 0..V-1, in any order, doubles allowed.

    Returns:
        [R, H] in the dtype of the file.

    Raises:
        BadInput: a row that the matrix does not have.
        UnreadableFile: as `load_tensor`.
    """
    count, width = location.info.shape
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < count:
        raise BadInput(
            f"{location.file}: {location.name} has {count} rows; {int(rows.min())}..{int(rows.max())} were asked for"
        )
    out = torch.empty((rows.numel(), width), dtype=_torch_dtype(location))
    order = torch.argsort(rows)
    in_order = rows[order]
    row_bytes = (location.info.end - location.info.start) // max(count, 1)
    with _opened(location.file) as descriptor:
        for first, last in _spans(in_order.tolist(), row_bytes):
            low, high = int(in_order[first]), int(in_order[last - 1])
            data = bytearray((high - low + 1) * row_bytes)
            _read_into(descriptor, memoryview(data), location.info.start + low * row_bytes, location)
            block = torch.frombuffer(data, dtype=out.dtype).reshape(-1, width)
            out[order[first:last]] = block[in_order[first:last] - low]
    return out


@dataclass(frozen=True)
class VerifierWeights:
    """What training takes from the verifier. All on the CPU, in the dtype of the file save the gain.

    embedding: [V, H], padding rows beyond vocab_size cut off; [0, H] where it was not asked for.
    head: [R, H] rows of the head, R = V where no rows were asked for.
    norm_gain: float32 [H], what the final norm multiplies by (1 + weight already applied where the family does so).
    """

    embedding: Tensor
    head: Tensor
    norm_gain: Tensor
    rms_norm_eps: float
    logit_scale: float
    final_logit_softcapping: float | None
    sources: tuple[TensorLocation, ...]

    def describe(self) -> list[str]:
        """One line `name file shape dtype` per tensor read."""
        return [str(location) for location in self.sources]


def load_verifier_weights(
    files: VerifierFiles, rows: Tensor | None = None, *, with_embedding: bool = True
) -> VerifierWeights:
    """Embedding, head and final norm of a verifier.

    Args:
        files: where they are.
        rows: int64 [R], verifier token ids whose head rows are wanted; None: all of them.
        with_embedding: whether the embedding is wanted.

    Raises:
        BadInput: a row outside the vocabulary.
        UnreadableFile: a file changed since it was checked, or a tensor of it cannot be meant.
    """
    if rows is not None and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < files.vocab_size:
        raise BadInput(f"{files.path}: head rows outside the vocabulary of {files.vocab_size} were asked for")
    embedding = torch.empty(0, files.hidden_size)
    if with_embedding:
        embedding = load_tensor(files.embedding)[: files.vocab_size]
    shared = files.tied and with_embedding
    if rows is not None:
        head = embedding[rows] if shared else load_rows(files.head, rows)
    else:
        head = embedding if shared else load_tensor(files.head)[: files.vocab_size]
    sources = [files.embedding] if with_embedding else []
    sources += [files.final_norm] if shared else [files.head, files.final_norm]
    norm = load_tensor(files.final_norm)
    # Not the embedding: a row that no text holds may be anything.
    _check_values(((files.head, head), (files.final_norm, norm)))
    return VerifierWeights(
        embedding=embedding,
        head=head,
        norm_gain=norm.float() + files.norm_gain_offset,
        rms_norm_eps=files.rms_norm_eps,
        logit_scale=files.logit_scale,
        final_logit_softcapping=files.final_logit_softcapping,
        sources=tuple(sources),
    )


def _check_values(read: Iterable[tuple[TensorLocation, Tensor]]) -> None:
    """Refuse what would make every loss nonsense, and be taken for a fault of the data.

    Raises:
        UnreadableFile: a value that is not finite, or none but zeros.
    """
    for location, tensor in read:
        if not tensor.numel():
            continue
        low, high = (float(bound) for bound in (tensor if tensor.dtype.itemsize > 1 else tensor.float()).aminmax())
        if not (math.isfinite(low) and math.isfinite(high)):
            raise UnreadableFile(location.file, "values", f"{location.name} holds values not finite", location.name)
        if low == high == 0:
            raise UnreadableFile(location.file, "values", f"{location.name} holds nothing but zeros", location.name)


def output_fingerprint(files: VerifierFiles) -> str:
    """sha256 of what targets come from, as far as it tells verifiers of one config apart: the final norm, and rows of
    embedding and head. A copy in another dtype has the same: values are taken as bfloat16.

    Raises:
        UnreadableFile: a file changed since it was checked.
    """
    rows = torch.linspace(0, files.vocab_size - 1, FINGERPRINT_ROWS).long()
    parts = load_tensor(files.final_norm), load_rows(files.embedding, rows), load_rows(files.head, rows)
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.bfloat16().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def tensor_chunks(location: TensorLocation, chunk_bytes: int = _READ_BYTES) -> Iterator[Tensor]:
    """A tensor as flat pieces in order, each valid until the next is asked for; memory stays at one piece.

    Pieces end at whole rows where a row fits into `chunk_bytes`.

    Raises:
        UnreadableFile: as `load_tensor`.
    """
    info = location.info
    dtype = _torch_dtype(location)
    total = info.end - info.start
    if total == 0:
        return
    rows = info.shape[0] if len(info.shape) > 1 else info.count
    row_bytes = total // rows if total % rows == 0 else dtype.itemsize
    size = max(chunk_bytes // row_bytes, 1) * row_bytes
    if size > 4 * chunk_bytes:
        size = chunk_bytes // dtype.itemsize * dtype.itemsize
    buffer = bytearray(min(size, total))
    with _opened(location.file) as descriptor:
        for offset in range(0, total, size):
            length = min(size, total - offset)
            _read_into(descriptor, memoryview(buffer)[:length], info.start + offset, location)
            yield torch.frombuffer(buffer, dtype=dtype, count=length // dtype.itemsize)


def _torch_dtype(location: TensorLocation) -> torch.dtype:
    dtype = TORCH_DTYPES.get(location.info.dtype)
    if dtype is None:
        raise UnreadableFile(
            location.file, "unknown_dtype", f"tensor {location.name!r} is {location.info.dtype}", location.name
        )
    return dtype


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UnreadableFile(path, "unreadable", f"cannot be opened: {error.strerror}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read_into(descriptor: int, view: memoryview, offset: int, location: TensorLocation) -> None:
    """Fill `view` from the file; pread, since a mapped file that is cut meanwhile kills the process."""
    while view:
        try:
            got = os.preadv(descriptor, [view[:_READ_BYTES]], offset)
        except OSError as error:
            raise UnreadableFile(
                location.file, "unreadable", f"tensor {location.name!r}: {error.strerror}", location.name
            ) from error
        if got == 0:
            raise UnreadableFile(
                location.file, "cut", f"ended inside tensor {location.name!r}, at byte {offset:,}", location.name
            )
        view, offset = view[got:], offset + got


def _spans(sorted_rows: list[int], row_bytes: int) -> Iterator[tuple[int, int]]:
    """Index ranges of rows that are worth reading together."""
    first = 0
    for index in range(1, len(sorted_rows) + 1):
        if index == len(sorted_rows):
            yield first, index
        elif (sorted_rows[index] - sorted_rows[index - 1] - 1) * row_bytes > _GAP_BYTES or (
            sorted_rows[index] - sorted_rows[first] + 1
        ) * row_bytes > _READ_BYTES:
            yield first, index
            first = index
