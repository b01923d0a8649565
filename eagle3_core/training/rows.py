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

CHUNK_TARGETS = 256
"""Targets scored at once: three [C, D] tensors are held. Fewer slow the products down, more leave the caches."""


@dataclass(frozen=True)
class Block:
    """Queries of one document and the keys they may see.

    Attributes:
        queries: among the rows of the step.
        keys: among the N key rows; all of the queries see the first `shared` of these.
        own_B1: int64 [B, 1], each query's own place among the N key rows.
        chain: for each step 1 .. s, where the queries' rows stand among that step's.
    """

    queries: slice
    keys: slice
    shared: int
    own_B1: Tensor
    chain: tuple[Index, ...]


@dataclass(frozen=True)
class Part:
    """What of a step is scored on one chunk of targets: places among the step's rows, and among the chunk's targets."""

    rows: Index
    targets: Index


@dataclass(frozen=True)
class StepRows:
    """The rows of one step.

    Attributes:
        keys_U: int64 [U], place among the N key rows; on the CPU.
        places: the same.
        positions_U: int64 [U], t + s.
        earlier: for each step before, where these rows stand among that step's.
        slots: where the token each row joins stands among the M slots; it is also what the row is scored on.
        query_slots: where it stands among the plan's `query_slots`.
        blocks: how they attend.
        parts: for each chunk of targets, what is scored on it; None: nothing.
        count: how many rows are scored.
    """

    keys_U: Tensor
    places: Index
    positions_U: Tensor
    earlier: tuple[Index, ...]
    slots: Index
    query_slots: Index
    blocks: tuple[Block, ...]
    parts: tuple[Part | None, ...]
    count: int


@dataclass(frozen=True)
class Plan:
    """Rows of every step of a pack, and what of each document it takes: states of tokens 0 .. key_rows - 1, tokens
    1 .. slots. A document nobody is scored in has neither. `positions_N` int64 [N]; `target_slots` are the C targets
    among the M slots, `chunks` those scored at once; `counts` the scored rows of each of the K steps, of which the last
    ones may have no rows at all.
    """

    key_rows: tuple[int, ...]
    slots: tuple[int, ...]
    positions_N: Tensor
    key_slots: Index
    query_slots: Index
    target_slots: Index
    chunks: tuple[slice, ...]
    counts: tuple[int, ...]
    steps: tuple[StepRows, ...]
    all_rows: StepRows


def plan_rows(
    rows_KR: Sequence[Tensor], layers: int = 1, window: int | None = None, device: torch.device | None = None
) -> Plan:
    """The rows to compute.

    Args:
        rows_KR: for each document, bool [K, T - 1], the rows that count at each step; a row t at step k only where
            the document has a token t + 2 + k.
        layers: of the drafter; with more than one, all key rows have queries at step 0.
        window: sliding window of the step-0 keys, in rows; None: none.
        device: where the places are needed, all but those of the targets, whose states are gathered where they lie.
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
    chunks = tuple(slice(low, low + CHUNK_TARGETS) for low in range(0, int(is_target.sum()), CHUNK_TARGETS))
    layout = _Layout(bounds, positions_N, slot_of_N, query_of_slot, target_of_slot, chunks, window, device)
    all_rows = layout.step(torch.arange(len(positions_N)), torch.zeros(len(positions_N), dtype=torch.bool), [])
    steps: list[StepRows] = []
    for rows, counted in zip(computed_KN, counted_KN, strict=True):
        keys_U = rows.nonzero()[:, 0]
        if not len(keys_U):
            break
        steps.append(layout.step(keys_U, counted[keys_U], steps))
    return Plan(
        key_rows=tuple(key_rows),
        slots=tuple(slots),
        positions_N=positions_N.to(device),
        key_slots=_at(as_index(slot_of_N), device),
        query_slots=_at(as_index(is_query.nonzero()[:, 0]), device),
        target_slots=as_index(is_target.nonzero()[:, 0]),
        chunks=chunks,
        counts=tuple(int(row.sum()) for row in counted_KN),
        steps=tuple(steps),
        all_rows=all_rows,
    )


@dataclass(frozen=True)
class _Layout:
    """Where the rows of a pack lie, and how those of one step follow from it.

    bounds: first key row of each document, and one behind the last.
    query_of_slot, target_of_slot: int64 [M], place among the query slots, among the targets.
    """

    bounds: list[int]
    positions_N: Tensor
    slot_of_N: Tensor
    query_of_slot: Tensor
    target_of_slot: Tensor
    chunks: tuple[slice, ...]
    window: int | None
    device: torch.device | None

    def step(self, keys_U: Tensor, counted_U: Tensor, before: Sequence[StepRows]) -> StepRows:
        """The rows of the step behind those of `before`; `counted_U` tells which are scored."""
        s = len(before)
        slots_U = self.slot_of_N[keys_U] + s
        earlier = [torch.searchsorted(step.keys_U, keys_U) for step in before]
        chain = [*earlier[1:], torch.arange(len(keys_U))] if s else []
        scored_R = counted_U.nonzero()[:, 0]
        return StepRows(
            keys_U=keys_U,
            places=_at(as_index(keys_U), self.device),
            positions_U=(self.positions_N[keys_U] + s).to(self.device),
            earlier=tuple(_at(as_index(places), self.device) for places in earlier),
            slots=_at(as_index(slots_U), self.device),
            query_slots=_at(as_index(self.query_of_slot[slots_U]), self.device),
            blocks=tuple(_blocks(keys_U, chain, self.bounds, self.window, self.device)),
            parts=tuple(_parts(scored_R, self.target_of_slot[slots_U[scored_R]], self.chunks, self.device)),
            count=len(scored_R),
        )


def _at(index: Index, device: torch.device | None) -> Index:
    return index.to(device) if isinstance(index, Tensor) else index


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
        return x.index_select(0, index)
    return x if index == slice(0, x.shape[0]) else x[index]


def add_to(total: Tensor, index: Index, rows: Tensor) -> None:
    """Add rows to those at the given places."""
    if isinstance(index, Tensor):
        total.index_add_(0, index, rows)
    else:
        total[index] += rows


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


def _piece(places: Tensor, there: Tensor, low: int, high: int) -> Index:
    """Places low .. high - 1 of those listed; `there` is the list where the places are needed."""
    index = as_index(places[low:high])
    return index if isinstance(index, slice) else there[low:high]


def _blocks(
    keys_U: Tensor, chain: Sequence[Tensor], bounds: list[int], window: int | None, device: torch.device | None
) -> Iterator[Block]:
    """Blocks of at most QUERY_BLOCK queries, none across two documents; `chain`: the places of `Block.chain`."""
    splits = torch.searchsorted(keys_U, torch.tensor(bounds)).tolist()
    chain_there = [places.to(device) for places in chain]
    own_U1 = keys_U[:, None].to(device)
    for start, (first, end) in zip(bounds, pairwise(splits), strict=False):
        for low in range(first, end, QUERY_BLOCK):
            high = min(low + QUERY_BLOCK, end)
            own, last = int(keys_U[low]), int(keys_U[high - 1])
            begin = start if window is None else max(start, own - window + 1)
            yield Block(
                queries=slice(low, high),
                keys=slice(begin, last + 1),
                shared=own + 1 - begin if window is None else 0,
                own_B1=own_U1[low:high],
                chain=tuple(_piece(*each, low, high) for each in zip(chain, chain_there, strict=True)),
            )


def _parts(
    rows_R: Tensor, targets_R: Tensor, chunks: Sequence[slice], device: torch.device | None
) -> Iterator[Part | None]:
    """For each chunk the scored rows whose targets, which rise, lie in it."""
    inside_R = targets_R % CHUNK_TARGETS
    there = rows_R.to(device), inside_R.to(device)
    for chunk in chunks:
        low, high = torch.searchsorted(targets_R, torch.tensor([chunk.start, chunk.stop])).tolist()
        places = (_piece(*each, low, high) for each in zip((rows_R, inside_R), there, strict=True))
        yield Part(*places) if high > low else None
