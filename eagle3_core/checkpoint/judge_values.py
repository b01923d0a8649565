"""The judge on values: every one finite, no zeros, constants or doubled rows where weights should be.

One piece of one tensor is held at a time. R rows, C columns.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eagle3_core.checkpoint.findings import Report
from eagle3_core.checkpoint.judge_tensors import FLOATS
from eagle3_core.checkpoint.stream import OpenFile
from eagle3_core.checkpoint.weights import Entry
from eagle3_core.contract.headers import TensorInfo
from eagle3_core.verifier.tensors import TORCH_DTYPES

EXTREME = 1e5
"""No weight of a working drafter comes near; one flipped exponent bit passes it."""

_EXTREME_HALF = 256.0
"""The same of a matrix in half precision, where the highest exponent bit makes 655 of 0.01 and nothing passes 65504."""

_NOTHING = 1e-20
"""A tensor of smaller values comes to nothing: denormal numbers, or exponents that lost a bit."""

_MOST_PADDING = 0.25
"""Share of an embedding's rows that may be zero for want of a token."""

_WORD = 8
_MIX = -7046029254386353131
"""An odd number of 64 bits without a pattern, so that two words become one that tells rows apart."""

_MOST_COMPARED = 4096
"""Rows that look alike are read again to be sure; this many at most."""

_MOST_ROWS = 1 << 20
"""Of longer matrices doubled rows are not looked for, since two words of each row are held; no vocabulary is longer."""


@dataclass
class Counts:
    """Sums over one tensor, taken piece by piece."""

    low: float = float("inf")
    high: float = float("-inf")
    nan: int = 0
    inf: int = 0
    first_bad: int | None = None
    zero_rows: int = 0
    doubled_rows: int = 0
    first_doubled: tuple[int, int] | None = None


class Scan:
    """Looks at one float tensor as its bytes go by.

    Args:
        info: the tensor.
        rows: whether it is a matrix whose rows should differ.
    """

    def __init__(self, info: TensorInfo, rows: bool) -> None:
        self.counts = Counts()
        self._info, self._seen = info, 0
        self._dtype = TORCH_DTYPES[info.dtype]
        self._columns = info.shape[-1] if rows and len(info.shape) == 2 else 0
        self._keys: list[Tensor] = []

    @property
    def row_bytes(self) -> int:
        """Of a row; 1 where rows do not matter."""
        return self._columns * self._dtype.itemsize or self._dtype.itemsize

    def update(self, raw: memoryview) -> None:
        """Take in the next bytes."""
        piece = torch.frombuffer(raw, dtype=self._dtype)
        low, high = (float(value) for value in torch.aminmax(piece))
        counts = self.counts
        # aminmax passes NaN on, so two numbers tell whether the slow count is needed.
        if not (abs(low) < float("inf") and abs(high) < float("inf")):
            self._count_bad(piece)
        else:
            counts.low, counts.high = min(counts.low, low), max(counts.high, high)
        if self._columns and piece.numel() % self._columns == 0:
            rows = piece.view(-1, self._columns)
            counts.zero_rows += _zero_rows(rows)
            if self.row_bytes % _WORD == 0 and self._info.shape[0] <= _MOST_ROWS:
                words = torch.frombuffer(raw, dtype=torch.int64).view(len(rows), -1)
                self._keys.append(torch.stack((words[:, 0], words[:, words.shape[1] // 2]), dim=1))
        self._seen += piece.numel()

    def finish(self, file: OpenFile) -> Counts:
        """The sums; reads those rows again that began and went on alike."""
        if self._keys:
            self._count_doubled(torch.cat(self._keys), file)
        return self.counts

    def _count_bad(self, piece: Tensor) -> None:
        counts = self.counts
        nan, inf = torch.isnan(piece), torch.isinf(piece)
        if counts.first_bad is None:
            counts.first_bad = self._seen + int((nan | inf).nonzero()[0])
        counts.nan += int(nan.sum())
        counts.inf += int(inf.sum())
        good = piece[~(nan | inf)]
        if good.numel():
            counts.low, counts.high = min(counts.low, float(good.min())), max(counts.high, float(good.max()))

    def _count_doubled(self, keys: Tensor, file: OpenFile) -> None:
        mixed, order = (keys[:, 0] * _MIX + keys[:, 1]).sort()
        same = mixed[1:] == mixed[:-1]
        alike = torch.tensor(sorted({*order[1:][same].tolist(), *order[:-1][same].tolist()}), dtype=torch.int64)
        alike = alike[(keys[alike] != 0).any(dim=1)][:_MOST_COMPARED]
        first: dict[bytes, int] = {}
        for row in alike.tolist():
            start = self._info.start + row * self.row_bytes
            content = b"".join(bytes(piece) for piece in file.pieces(start, start + self.row_bytes))
            if first.setdefault(content, row) != row:
                self.counts.doubled_rows += 1
                self.counts.first_doubled = self.counts.first_doubled or (first[content], row)


def _zero_rows(rows: Tensor) -> int:
    """Rows of zeros; only those that begin with a zero are looked at in full."""
    candidates = (rows[:, 0] == 0).nonzero().flatten()
    return int((rows[candidates] == 0).all(dim=1).sum()) if candidates.numel() else 0


def is_scanned(dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor holds values to look at."""
    return dtype in FLOATS and 0 not in shape


def judge_weights(report: Report, name: str, entry: Entry, counts: Counts) -> None:
    """Findings on one tensor of the drafter."""

    def add(code: str, message: str) -> None:
        report.add(code, f"{name} {message}", file=entry.file, tensor=name)

    embedding = name == "embed_tokens.weight"
    if counts.nan or counts.inf:
        place = counts.first_bad or 0
        at = [place] if len(entry.shape) < 2 else [place // entry.shape[-1], place % entry.shape[-1]]
        add("not_finite", f"holds {counts.nan} NaN and {counts.inf} Inf, the first at {at}")
    elif max(-counts.low, counts.high) < _NOTHING:
        if not name.endswith(".bias"):
            nearly = "" if counts.low == counts.high == 0 else f", or nearly: at most {max(-counts.low, counts.high):g}"
            add("all_zero", f"{list(entry.shape)} is all zero{nearly}")
    elif counts.low == counts.high and len(entry.shape) > 1:
        add("constant", f"{list(entry.shape)} is {counts.low:g} everywhere")
    else:
        if counts.zero_rows:
            padding = embedding and counts.zero_rows <= entry.shape[0] * _MOST_PADDING
            code = "zero_embedding_rows" if padding else "zero_rows"
            add(code, f"has {counts.zero_rows} rows of zeros out of {entry.shape[0]}")
        if counts.first_doubled is not None:
            one, other = counts.first_doubled
            add(
                "duplicate_embedding_rows" if embedding else "duplicate_rows",
                f"has {counts.doubled_rows} rows that repeat another out of {entry.shape[0]}, the first is {other}, "
                f"the same as {one}",
            )
    most = _EXTREME_HALF if entry.dtype == "F16" and len(entry.shape) > 1 else EXTREME
    if max(abs(counts.low), abs(counts.high)) > most and counts.low <= counts.high:
        add("extreme_values", f"ranges from {counts.low:g} to {counts.high:g}")


def judge_moments(report: Report, file: Path, name: str, key: str, counts: Counts) -> None:
    """Findings on one tensor of the optimizer's state."""
    if counts.nan or counts.inf:
        bad = counts.nan + counts.inf
        report.add("not_finite", f"optimizer state {key} of {name} holds {bad} NaN or Inf", file=file, tensor=name)
    elif key in ("exp_avg_sq", "max_exp_avg_sq", "step") and counts.low < 0:
        report.add("optimizer_mismatch", f"optimizer state {key} of {name} is negative", file=file, tensor=name)
