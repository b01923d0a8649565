"""Numbers on rows: lengths, share that is supervised, coverage by a draft vocabulary. No state is read.

V verifier vocabulary.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eagle3_core.contract.prepared_files import MANIFEST
from eagle3_core.contract.store_files import INDEX
from eagle3_core.data.prepared import load_prepared
from eagle3_core.data.store import HiddenStateStore
from eagle3_core.errors import BadData
from eagle3_core.model.vocab_map import FILE_NAME, load_vocab_map

MOST_TOKENS = 1 << 24
"""No vocabulary comes near; a damaged id must not take memory."""


@dataclass(frozen=True)
class Spread:
    """Of the tokens of rows: least, median, 95th percentile and most, and their sum."""

    min: int
    median: int
    p95: int
    max: int
    total: int


@dataclass(frozen=True)
class Stats:
    """What `eyas data stats` tells.

    length: tokens of the rows; `supervised`: of their answers.
    supervised_share: 0..1.
    distinct_tokens: different token ids among the supervised ones.
    draft_vocab_size: of the map; None where none was given.
    coverage: share of the supervised tokens that the map can propose, 0..1.
    unused_draft_tokens: tokens of the map that no answer holds.
    """

    rows: int
    length: Spread
    supervised: Spread
    supervised_share: float
    rows_without_answer: int
    distinct_tokens: int
    draft_vocab_size: int | None = None
    coverage: float | None = None
    unused_draft_tokens: int | None = None


def stats_of(path: Path, map_dir: Path | None = None) -> Stats:
    """The numbers of a hidden-state store, or of the output of a prepare job.

    Args:
        path: the directory.
        map_dir: directory of a vocab_map.safetensors; default: `path`, where it holds one.

    Raises:
        BadData: neither, or damaged.
        BadInput: the map cannot be read.
    """
    if map_dir is None and (path / FILE_NAME).exists():
        map_dir = path
    vocab_map = None if map_dir is None else load_vocab_map(map_dir)
    lengths, answers, counter = [], [], _Counter()
    for ids, mask in _rows(path):
        lengths.append(len(ids))
        answers.append(int(mask.sum()))
        if not 0 <= int(ids.min()) <= int(ids.max()) < MOST_TOKENS:
            raise BadData(f"{path}: a row holds what is no token id; `eyas data check` says which")
        counter.add(ids[mask])
    counts_V = counter.counts()
    length, supervised = _spread(lengths), _spread(answers)
    coverage = unused = None
    if vocab_map is not None:
        tokens_D = vocab_map.target_ids_D
        known_D = tokens_D[tokens_D < len(counts_V)]
        coverage = int(counts_V[known_D].sum()) / max(supervised.total, 1)
        unused = len(tokens_D) - int((counts_V[known_D] > 0).sum())
    return Stats(
        rows=len(lengths),
        length=length,
        supervised=supervised,
        supervised_share=supervised.total / length.total,
        rows_without_answer=answers.count(0),
        distinct_tokens=int((counts_V > 0).sum()),
        draft_vocab_size=None if vocab_map is None else len(vocab_map.d2t_D),
        coverage=coverage,
        unused_draft_tokens=unused,
    )


class _Counter:
    """Occurrences of token ids, counted a million at a time: a count costs a pass over the vocabulary."""

    def __init__(self) -> None:
        self._pending: list[Tensor] = []
        self._size = 0
        self._counts_V = torch.zeros(0, dtype=torch.int64)

    def add(self, ids: Tensor) -> None:
        """Take in token ids."""
        self._pending.append(ids)
        self._size += len(ids)
        if self._size > 1 << 20:
            self.counts()

    def counts(self) -> Tensor:
        """int64 [largest id + 1]."""
        ids = torch.cat([*self._pending, torch.zeros(0, dtype=torch.int64)])
        counts_V = torch.bincount(ids, minlength=len(self._counts_V))
        counts_V[: len(self._counts_V)] += self._counts_V
        self._counts_V, self._pending, self._size = counts_V, [], 0
        return counts_V


def _rows(path: Path) -> Iterator[tuple[Tensor, Tensor]]:
    if (path / INDEX).exists():
        return HiddenStateStore(path).masks()
    if (path / MANIFEST).exists():
        return iter([(row.token_ids_T, row.loss_mask_T) for row in load_prepared(path)[1]])
    raise BadData(f"{path} holds neither {INDEX} (a hidden-state store) nor {MANIFEST} (the output of prepare)")


def _spread(values: Iterable[int]) -> Spread:
    ordered = sorted(values)
    if not ordered:
        raise BadData("no rows")
    median, p95 = (ordered[math.ceil(len(ordered) * share) - 1] for share in (0.5, 0.95))
    return Spread(ordered[0], median, p95, ordered[-1], sum(ordered))
