"""Which rows are computed at each TTT step, for a pack of documents: just those the loss depends on.

R_k are the rows that count at step k, U_s the union of R_j over j >= s (for nested sets, R_s itself). A drafter needs

    step 0     keys and values of each document's rows up to its last counted one; queries and all behind them of U_0
    step s     everything of U_s; a row attends to step-0 keys of its document up to its own, and to its own one key
               of each step 1 .. s
    loss       R_s

and nothing else: a row reaches another row only through step-0 keys, which come from the fused states and the
embedding alone. (With several layers the step-0 keys of a later layer come from all key rows of the one before.)

Documents lie one behind the other. N key rows in all; M token slots: slot i holds token i + 1 of its document, which
row t joins at step s = i - t, and the verifier's word on which is the target of row t at that step. C targets are the
slots some row is scored on. U rows of a step, K steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

Index = slice | Tensor
"""Places along a first dimension: a slice where they are a range, which costs no copy, else int64."""

QUERY_BLOCK = 128
"""Queries that attend at once; their scores against all earlier keys are what attention holds in memory."""


@dataclass(frozen=True)
class Block:
    """Queries of one document and the keys they may see; all of them see the first `shared` of these keys."""

    queries: slice
    keys: slice
    shared: int


@dataclass(frozen=True)
class StepRows:
    """The rows of one step.

    Attributes:
        keys_U: int64 [U], place among the N key rows.
        positions_U: int64 [U], t + s.
        earlier: for each step before, where these rows stand among that step's.
        slots: where the token each row joins stands among the M slots; it is also what the row is scored on.
        query_slots: where it stands among the plan's `query_slots`.
        blocks: how they attend.
        counted: which of them are scored.
        targets_R: int64, for each scored row, its target among the C.
    """

    keys_U: Tensor
    positions_U: Tensor
    earlier: tuple[Index, ...]
    slots: Index
    query_slots: Index
    blocks: tuple[Block, ...]
    counted: Index
    targets_R: Tensor


@dataclass(frozen=True)
class Plan:
    """Rows of every step of a pack, and what of each document it takes: states of tokens 0 .. key_rows - 1, tokens
    1 .. slots. A document nobody is scored in has neither. `positions_N` int64 [N]; `target_slots` are the C targets
    among the M slots; `counts` the scored rows of each of the K steps, of which the last ones may have no rows at all.
    """

    key_rows: tuple[int, ...]
    slots: tuple[int, ...]
    positions_N: Tensor
    key_slots: Index
    query_slots: Index
    target_slots: Index
    counts: tuple[int, ...]
    steps: tuple[StepRows, ...]
    all_rows: StepRows


def plan_rows(rows_KR: Sequence[Tensor], layers: int = 1, window: int | None = None) -> Plan:
    """The rows to compute.

    Args:
        rows_KR: for each document, bool [K, T - 1], the rows that count at each step; a row t at step k only where
            the document has a token t + 2 + k.
        layers: of the drafter; with more than one, all key rows have queries at step 0.
        window: sliding window of the step-0 keys, in rows; None: none.
    """
    computed = [rows.flip(0).cumsum(0).flip(0) > 0 for rows in rows_KR]
    key_rows = [_end(rows[0]) for rows in computed]
    slots = [max((_end(row) + s for s, row in enumerate(rows) if row.any()), default=0) for rows in computed]
    counted_KN = torch.cat([rows[:, :n] for rows, n in zip(rows_KR, key_rows, strict=True)], dim=1)
    computed_KN = torch.cat([rows[:, :n] for rows, n in zip(computed, key_rows, strict=True)], dim=1)
    positions_N = torch.cat([torch.arange(n) for n in key_rows])
    starts = torch.tensor([0, *key_rows]).cumsum(0)
    slot_starts = torch.tensor([0, *slots]).cumsum(0)
    slot_of_N = positions_N + torch.repeat_interleave(slot_starts[:-1], torch.tensor(key_rows))
    bounds = starts.tolist()

    is_target, is_query = (_slots_of(rows, slot_of_N, sum(slots)) for rows in (counted_KN, computed_KN))
    if layers > 1:
        is_query[slot_of_N] = True
    target_of_slot, query_of_slot = is_target.cumsum(0) - 1, is_query.cumsum(0) - 1
    steps: list[StepRows] = []
    for s in range(counted_KN.shape[0]):
        keys_U = computed_KN[s].nonzero()[:, 0]
        if not len(keys_U):
            break
        counted = counted_KN[s][keys_U]
        slots_U = slot_of_N[keys_U] + s
        steps.append(
            StepRows(
                keys_U=keys_U,
                positions_U=positions_N[keys_U] + s,
                earlier=tuple(as_index(torch.searchsorted(step.keys_U, keys_U)) for step in steps),
                slots=as_index(slots_U),
                query_slots=as_index(query_of_slot[slots_U]),
                blocks=tuple(_blocks(keys_U, bounds, window)),
                counted=as_index(counted.nonzero()[:, 0]),
                targets_R=target_of_slot[slots_U[counted]],
            )
        )
    everything = torch.arange(len(positions_N))
    return Plan(
        key_rows=tuple(key_rows),
        slots=tuple(slots),
        positions_N=positions_N,
        key_slots=as_index(slot_of_N),
        query_slots=as_index(is_query.nonzero()[:, 0]),
        target_slots=as_index(is_target.nonzero()[:, 0]),
        counts=tuple(int(row.sum()) for row in counted_KN),
        steps=tuple(steps),
        all_rows=StepRows(
            keys_U=everything,
            positions_U=positions_N,
            earlier=(),
            slots=as_index(slot_of_N),
            query_slots=as_index(query_of_slot[slot_of_N]),
            blocks=tuple(_blocks(everything, bounds, window)),
            counted=slice(0, 0),
            targets_R=everything[:0],
        ),
    )


def as_index(places: Tensor) -> Index:
    """The same places, as a slice where they are a rising range."""
    count = len(places)
    if not count:
        return slice(0, 0)
    first = int(places[0])
    return slice(first, first + count) if int(places[-1]) - first == count - 1 else places


def take(x: Tensor, index: Index) -> Tensor:
    """Rows of x; a view where the index is a slice, x itself where it is all of it."""
    if isinstance(index, Tensor):
        return x.index_select(0, index.to(x.device))
    return x if index == slice(0, x.shape[0]) else x[index]


def add_to(total: Tensor, index: Index, rows: Tensor) -> None:
    """Add rows to those at the given places."""
    if isinstance(index, Tensor):
        total.index_add_(0, index.to(total.device), rows)
    else:
        total[index] += rows


def within(index: Index, part: slice) -> Index:
    """Those of the places that stand at start .. stop - 1 among them."""
    if isinstance(index, Tensor):
        return as_index(index[part])
    return slice(index.start + part.start, index.start + part.stop)


def _slots_of(rows_KN: Tensor, slot_of_N: Tensor, count: int) -> Tensor:
    """bool [count], the slots that the given rows join."""
    slots = torch.zeros(count, dtype=torch.bool)
    for s, row in enumerate(rows_KN):
        slots[slot_of_N[row.nonzero()[:, 0]] + s] = True
    return slots


def _end(flags: Tensor) -> int:
    """One behind the last set place, 0 where none is."""
    places = flags.nonzero()
    return int(places[-1]) + 1 if len(places) else 0


def _blocks(keys_U: Tensor, bounds: list[int], window: int | None) -> Iterator[Block]:
    """Blocks of at most QUERY_BLOCK queries, none across two documents."""
    splits = torch.searchsorted(keys_U, torch.tensor(bounds)).tolist()
    for start, (first, end) in zip(bounds, pairwise(splits), strict=False):
        for low in range(first, end, QUERY_BLOCK):
            high = min(low + QUERY_BLOCK, end)
            own, last = int(keys_U[low]), int(keys_U[high - 1])
            begin = start if window is None else max(start, own - window + 1)
            yield Block(slice(low, high), slice(begin, last + 1), own + 1 - begin if window is None else 0)
