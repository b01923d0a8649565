"""The judge on a drafter's matrices beside the verifier's: the embedding, and the rows of the head.

R rows of a piece, H hidden, D draft vocabulary.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from eagle3_core.checkpoint.findings import Report
from eagle3_core.checkpoint.judge_bytes import Part
from eagle3_core.checkpoint.stream import OpenFile
from eagle3_core.checkpoint.weights import Entry
from eagle3_core.contract.weight_files import TensorLocation
from eagle3_core.errors import UnreadableFile
from eagle3_core.verifier.tensors import TORCH_DTYPES, load_rows

_BLOCK_VALUES = 1 << 20
_SAMPLED_ROWS = 16
_DERIVED, _ASTRAY, _SURE = 0.5, 0.2, 0.95
"""Rows of a head that began as the verifier's stay near them; a row this far from its own is another token's."""


class _Rows:
    """Rows of a drafter's matrix beside rows of one of the verifier's, a block at a time."""

    def __init__(self, entry: Entry, theirs: TensorLocation, rows: Tensor) -> None:
        """Compare row r of `entry` with row `rows[r]` (int64 [R]) of `theirs`, as far as `rows` goes."""
        self._dtype, self._columns = TORCH_DTYPES[entry.dtype], entry.shape[1]
        self._theirs, self._rows, self._seen = theirs, rows, 0
        self.lost: str | None = None

    def blocks(self, raw: memoryview) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(first row, ours [R, H], theirs [R, H]) of a piece of the matrix; none once the verifier cannot be read."""
        ours = torch.frombuffer(raw, dtype=self._dtype).view(-1, self._columns)
        size = max(_BLOCK_VALUES // self._columns, 1)
        for first in range(0, len(ours), size):
            wanted = self._rows[self._seen + first : self._seen + min(first + size, len(ours))]
            if not len(wanted) or self.lost is not None:
                continue
            try:
                theirs = load_rows(self._theirs, wanted)
            except UnreadableFile as error:  # no fault of the drafter
                self.lost = str(error)
                continue
            yield self._seen + first, ours[first : first + len(wanted)], theirs
        self._seen += len(ours)


def watch_embedding(report: Report, entry: Entry, part: Part, verifier: TensorLocation, trained: bool) -> None:
    """Have the embedding compared with the verifier's, in the drafter's precision; rows one lacks are padding."""
    if verifier.info.shape[1:] != entry.shape[1:]:
        return
    shared = min(entry.shape[0], verifier.info.shape[0])
    rows = _Rows(entry, verifier, torch.arange(shared))
    different: list[int] = []

    def look(raw: memoryview) -> None:
        for start, ours, theirs in rows.blocks(raw):
            unequal = (ours != theirs.to(ours.dtype)).any(dim=1).nonzero().flatten()
            different.extend((unequal + start).tolist())

    def done(_: OpenFile) -> None:
        _tell_lost(report, rows)
        if different:
            report.add(
                "own_embedding" if trained else "embedding_differs",
                f"embed_tokens.weight differs from the verifier's {verifier.name} in {len(different)} of {shared} "
                f"rows, the first is {different[0]}",
                file=entry.file,
                tensor="embed_tokens.weight",
            )

    part.looks.append(look)
    part.done.append(done)


class _Head:
    """A drafter's head beside the verifier's rows for the tokens d2t leads to.

    A head that was initialised from the verifier's keeps most of each row's direction, also where it is trained. One
    that was trained from nothing has no likeness to any row and tells nothing; where `mixed`, some rows may be so.
    One that was `frozen` is the verifier's to the last bit.
    """

    def __init__(
        self, entry: Entry, verifier: TensorLocation, targets: Sequence[int], mixed: bool, frozen: bool
    ) -> None:
        self._verifier, self._targets, self._mixed = verifier, targets, mixed
        self.rows = _Rows(entry, verifier, torch.tensor(targets))
        self._frozen = frozen and not mixed
        self._likeness: list[Tensor] = []
        self._changed: list[int] = []
        step = max(len(targets) // _SAMPLED_ROWS, 1)
        self._sampled = range(0, len(targets), step)[:_SAMPLED_ROWS]
        self._samples: list[Tensor] = []

    def look(self, raw: memoryview) -> None:
        """Take in the next rows."""
        for start, ours, theirs in self.rows.blocks(raw):
            self._likeness.append(cosine_similarity(ours.float(), theirs.float(), dim=1))
            if self._frozen:
                unequal = (ours != theirs.to(ours.dtype)).any(dim=1).nonzero().flatten()
                self._changed.extend((unequal + start).tolist())
            here = [row - start for row in self._sampled if start <= row < start + len(ours)]
            self._samples.extend(ours[here].float())

    def fault(self) -> str | None:
        """What is wrong with it, if anything."""
        likeness = torch.cat(self._likeness) if self._likeness else torch.empty(0)
        astray = (likeness < _ASTRAY).nonzero().flatten().tolist()
        if self.rows.lost is not None:
            return None
        if 0 < len(self._changed) * 2 < len(self._targets):
            return (
                f"{len(self._changed)} rows of lm_head.weight are not the verifier's {self._verifier.name} for the "
                f"tokens d2t leads them to, though it was frozen and the others are: draft ids {self._changed[:4]}"
            )
        if not astray:
            return None
        if float(likeness.median()) > _DERIVED and not self._mixed:
            return (
                f"{len(astray)} rows of lm_head.weight are unlike the verifier's {self._verifier.name} for the tokens "
                f"d2t leads them to, though the others are alike: draft ids {astray[:4]}"
            )
        found = self._tokens_of_samples()
        if len(found) * 2 < len(self._samples):
            return None
        row, token = found[0]
        return (
            f"rows of lm_head.weight are the verifier's {self._verifier.name} for other tokens than d2t leads them to: "
            f"draft id {row} stands for token {self._targets[row]}, its row is that of {token}"
        )

    def _tokens_of_samples(self) -> list[tuple[int, int]]:
        """(draft id, verifier token) of sampled rows that are alike a row of the verifier's for another token."""
        samples = torch.nn.functional.normalize(torch.stack(self._samples), dim=1)
        best, token = torch.full((len(samples),), -1.0), torch.zeros(len(samples), dtype=torch.int64)
        rows, width = self._verifier.info.shape
        for first in range(0, rows, size := max(_BLOCK_VALUES // width, 1)):
            block = load_rows(self._verifier, torch.arange(first, min(first + size, rows)))
            value, place = (samples @ torch.nn.functional.normalize(block.float(), dim=1).T).max(dim=1)
            token[value > best] = first + place[value > best]
            best = torch.maximum(best, value)
        found = zip(self._sampled, token.tolist(), best.tolist(), strict=True)
        # The best of `rows` chance directions comes to sqrt(2 ln rows / width): little, save in tiny models.
        chance = (math.sqrt(2 * math.log(rows)) + 2) / math.sqrt(width)
        least = min(max(_DERIVED, chance), _SURE)
        return [(row, one) for row, one, value in found if value > least and one != self._targets[row]]


def watch_head(
    report: Report,
    entry: Entry,
    part: Part,
    verifier: TensorLocation,
    targets: Sequence[int],
    mixed: bool,
    frozen: bool,
) -> None:
    """Have the rows of the head compared with those of the verifier's that d2t leads to; where `mixed`, some of them
    are another drafter's; where `frozen`, none of them was trained.
    """
    if verifier.info.shape[1:] != entry.shape[1:] or max(targets, default=0) >= verifier.info.shape[0]:
        return
    head = _Head(entry, verifier, targets, mixed, frozen)

    def done(_: OpenFile) -> None:
        fault = None
        try:
            fault = head.fault()
        except UnreadableFile as error:
            head.rows.lost = str(error)
        _tell_lost(report, head.rows)
        if fault is not None:
            report.add("head_rows_differ", fault, file=entry.file, tensor="lm_head.weight")

    part.looks.append(head.look)
    part.done.append(done)


def _tell_lost(report: Report, rows: _Rows) -> None:
    if rows.lost is not None:
        report.add("verifier_unreadable", f"the verifier's weights could not be read: {rows.lost}")
