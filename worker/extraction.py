"""Rows through a verifier into a store: what runs together, and how states leave the device while the next batch runs.

    main thread     forward pass -> checks -> stored form -> copy begins       forward pass of the next batch -> ...
    writer thread                                  waits for the copy -> digest and file; ends a shard that is full

Which rows share a batch and a shard is settled by their lengths before anything runs, so that neither a restart nor the
speed of a disk changes a byte.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Self

import torch
from torch import Tensor

from eagle3_core.contract.store_files import StoreMeta
from eagle3_core.data.conversations import TokenRow
from eagle3_core.data.store import DTYPES, check_states, suspicious
from eagle3_core.data.store_writer import ShardWriter, UnfinishedStore, stored_form
from worker.states import StateReader

Batch = list[int]
"""Numbers of the rows that run together."""


def length_batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[Batch]:
    """Row numbers in batches of similar length, the longest first; padded size at most `batch_tokens`, one row at
    least. Longest first, so that memory runs out at once or never.
    """
    batch: Batch = []
    for index in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def plan_shards(lengths: Sequence[int], batch_tokens: int, shard_tokens: int) -> list[list[Batch]]:
    """The batches of each shard; a shard ends with the batch that fills it.

    Args:
        lengths: tokens of each row.
        batch_tokens: tokens of a batch, padding included.
        shard_tokens: tokens of a shard, about.
    """
    shards: list[list[Batch]] = []
    room = 0
    for batch in length_batches(lengths, batch_tokens):
        if room <= 0:
            shards.append([])
            room = shard_tokens
        shards[-1].append(batch)
        room -= sum(lengths[row] for row in batch)
    return shards


class Extraction:
    """Extracts the shards that a store lacks. Used as a context manager, which ends its thread."""

    def __init__(
        self, reader: StateReader, store: UnfinishedStore, meta: StoreMeta, rows: Sequence[TokenRow], dtype: torch.dtype
    ) -> None:
        """Set up.

        Args:
            reader: hooked into the verifier.
            store: what is to be filled.
            meta: what its states are.
            rows: all prepared rows.
            dtype: of the verifier's forward pass.
        """
        self._reader, self._store, self._meta, self._rows = reader, store, meta, rows
        self._dtype = dtype if meta.dtype == "float8_e4m3" else DTYPES[meta.dtype]
        on_gpu = reader.device.type == "cuda"
        self._copies = torch.Stream(device=reader.device) if on_gpu else None
        # On a CPU the states of the batch before are written long before the first ones of a batch come.
        self._buffers = 2 if on_gpu else 1
        self._thread = ThreadPoolExecutor(1, "shard-writer")
        self._written: deque[Future[None]] = deque()
        self._shard: ShardWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)
        if self._shard is not None:
            self._shard.abandon()

    def run(self, shards: Mapping[int, Sequence[Batch]], on_batch: Callable[[Batch], None]) -> None:
        """Extract these shards.

        Args:
            shards: number -> its batches, in order.
            on_batch: told of each batch behind its forward pass; what it raises ends the extraction.

        Raises:
            BadData: states that cannot be what was asked for; names row, layer and counts. Whole shards stay,
                and nothing else.
            OSError: a shard cannot be written; names it.
        """
        turns = [(number, batch, batches) for number, batches in shards.items() for batch in batches]
        most = max((self._tokens(batch) for _, batch, _ in turns), default=0)
        shape = (most, len(self._meta.layer_ids) + 1, self._meta.hidden_size)
        buffers = [torch.empty(shape, dtype=self._dtype, device=self._reader.device) for _ in range(self._buffers)]
        for turn, (number, batch, batches) in enumerate(turns):
            place = partial(self._place, buffers[turn % self._buffers], self._tokens(batch))
            states = self._reader.read([self._rows[row] for row in batch], batch, place)
            self._check(batch, states)
            self._hand_over(number, states, first=batch is batches[0], last=batch is batches[-1])
            on_batch(batch)
        self._wait(at_most=0)

    def _place(self, buffer: Tensor, tokens: int) -> Tensor:
        """Room for the states of a batch, once those that lie there are written."""
        self._wait(at_most=self._buffers - 1)
        return buffer[:tokens]

    def _tokens(self, batch: Batch) -> int:
        return sum(len(self._rows[row].token_ids_T) for row in batch)

    def _check(self, batch: Batch, states: Tensor) -> None:
        if suspicious(states):
            lengths = [len(self._rows[row].token_ids_T) for row in batch]
            for row, length, part in zip(batch, lengths, torch.split(states, lengths), strict=True):
                check_states(part, length, self._meta, f"row {row}")

    def _hand_over(self, number: int, states: Tensor, first: bool, last: bool) -> None:
        """Have states copied off the device and written, both while the next batch runs."""
        parts = stored_form(states, self._meta)
        if self._copies is None:
            self._written.append(self._thread.submit(self._write, number, parts, None, first, last))
            return
        self._copies.wait_stream(torch.accelerator.current_stream(self._reader.device))
        with self._copies:
            on_cpu = tuple(part.to("cpu", non_blocking=True) for part in parts)  # into pinned memory
            copied = self._copies.record_event()
        for part in parts:
            part.record_stream(self._copies)
        self._written.append(self._thread.submit(self._write, number, on_cpu, copied, first, last))

    def _write(self, number: int, parts: Sequence[Tensor], copied: torch.Event | None, first: bool, last: bool) -> None:
        if first:
            self._shard = self._store.begin(number)
        if copied is not None:
            copied.synchronize()
        assert self._shard is not None
        self._shard.write(*parts)
        if last:
            self._store.end(number, self._shard)

    def _wait(self, at_most: int) -> None:
        """Until so many batches are on their way to disk; raises what went wrong with the others."""
        while len(self._written) > at_most:
            self._written.popleft().result()
