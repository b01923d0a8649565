"""Writing a hidden-state store (its layout: store.py). Every byte follows from the rows and their states.

    ShardWriter       one shard, its rows known beforehand: states go to the file as they come
    UnfinishedStore   all rows known beforehand, shard by shard, each of which may be there from an earlier life

A shard appears under its name when it is whole. Then its line goes into unfinished.jsonl, and at the end the lines
become index.json: a store is finished once that is there, and a shard that no line names does not count.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import accumulate
from pathlib import Path

import torch
from blake3 import blake3
from pydantic import ValidationError
from torch import Tensor

from eagle3_core.contract.headers import header_bytes
from eagle3_core.contract.jobdir import append_line, complete_lines, whole_file, write_whole
from eagle3_core.contract.store_files import INDEX, UNFINISHED, RowEntry, ShardEntry, StoreIndex, StoreMeta, read_index
from eagle3_core.data.conversations import TokenRow
from eagle3_core.data.fp8 import quantise
from eagle3_core.data.store import (
    DTYPES,
    META_KEY,
    HiddenStateStore,
    check_digest,
    shard_tensors,
)
from eagle3_core.errors import BadData

NumberedRow = tuple[int, TokenRow]
"""A row and its number in the prepared data."""


def shard_name(number: int) -> str:
    """The file of the shard of that number."""
    return f"shard_{number:05d}.safetensors"


def stored_form(states_NLH: Tensor, meta: StoreMeta) -> tuple[Tensor, ...]:
    """The states in the dtype of the store; of float8_e4m3 codes and scales."""
    return quantise(states_NLH) if meta.dtype == "float8_e4m3" else (states_NLH.to(DTYPES[meta.dtype]),)


def row_entries(rows: Sequence[NumberedRow]) -> tuple[RowEntry, ...]:
    """Where each row lies in a shard of just these rows."""
    starts = accumulate((len(row.token_ids_T) for _, row in rows), initial=0)
    return tuple(
        RowEntry(row=number, start=start, length=len(row.token_ids_T), prompt=row.prompt)
        for (number, row), start in zip(rows, starts, strict=False)
    )


class _Abandoned(Exception):
    """Nobody wants the shard any more."""


class ShardWriter:
    """One shard file. What fails leaves no file behind and names it."""

    def __init__(self, directory: Path, number: int, meta: StoreMeta, rows: Sequence[NumberedRow]) -> None:
        """Begin the file: header and token ids.

        Args:
            directory: of the store.
            number: of the shard.
            meta: of the store.
            rows: all rows of the shard, in order.

        Raises:
            OSError: the file cannot be written; names it.
        """
        self._name, self._meta, self._rows = shard_name(number), meta, rows
        self._tokens = sum(len(row.token_ids_T) for _, row in rows)
        self._states = self._bytes = 0
        self._scales: list[Tensor] = []
        self._digest = blake3()
        self._open = ExitStack()
        self._file = self._open.enter_context(whole_file(directory / self._name))
        self._put(header_bytes(shard_tensors(self._tokens, meta), {META_KEY: meta.model_dump_json()}))
        self._put_tensor(torch.cat([row.token_ids_T for _, row in rows]).to(torch.int64))

    def write(self, states_NLH: Tensor, scales_NL: Tensor | None = None) -> None:
        """Append the states of the next n tokens, in the form `stored_form` gives, on the CPU.

        Raises:
            OSError: as above.
        """
        self._states += len(states_NLH)
        self._put_tensor(states_NLH)
        if scales_NL is not None:
            self._scales.append(scales_NL)

    def close(self) -> ShardEntry:
        """Have the whole file on disk under its name; returns what the index says of it.

        Raises:
            OSError: as above.
        """
        assert self._states == self._tokens, f"{self._states} states for {self._tokens} tokens"
        if self._scales:
            self._put_tensor(torch.cat(self._scales))
        self._put_tensor(torch.cat([row.loss_mask_T for _, row in self._rows]).to(torch.bool))
        self._open.close()
        return ShardEntry(
            file=self._name, bytes=self._bytes, blake3=self._digest.hexdigest(), rows=row_entries(self._rows)
        )

    def abandon(self) -> None:
        """Drop what is written; nothing to do after `close`."""
        with suppress(_Abandoned), self._open:
            raise _Abandoned

    def _put_tensor(self, tensor: Tensor) -> None:
        self._put(tensor.contiguous().view(torch.uint8).numpy().data.cast("B"))

    def _put(self, data: bytes | memoryview) -> None:
        try:
            self._file.write(data)
        except BaseException:
            with self._open:  # which clears the file away and names it
                raise
        self._digest.update(data)
        self._bytes += len(data)


class UnfinishedStore:
    """A store of rows that are all known, some shards of which may be there already. One writer at a time."""

    def __init__(
        self,
        directory: Path,
        meta: StoreMeta,
        plan: Sequence[Sequence[NumberedRow]],
        on_shard: Callable[[], None] = lambda: None,
    ) -> None:
        """See what is there, by every byte of it.

        Args:
            directory: of the store.
            meta: what its states are.
            plan: the rows of each shard, in order.
            on_shard: called before each shard that is looked at; what it raises ends this.
        """
        self._directory, self._meta, self._plan, self._on_shard = directory, meta, plan, on_shard
        self._journal = directory / UNFINISHED
        self.redone: list[str] = []
        """Why shards that were there do not count."""
        self._shards = self._sound_shards()
        self._journal_is_mine = False

    @property
    def missing(self) -> list[int]:
        """Numbers of the shards that are still to be written."""
        return [number for number in range(len(self._plan)) if number not in self._shards]

    def begin(self, number: int) -> ShardWriter:
        """A writer of one shard.

        Raises:
            OSError: as `ShardWriter`.
        """
        (self._directory / INDEX).unlink(missing_ok=True)  # nobody shall take it for finished
        return ShardWriter(self._directory, number, self._meta, self._plan[number])

    def end(self, number: int, writer: ShardWriter) -> None:
        """Close a shard and note that it is there.

        Raises:
            OSError: as `ShardWriter`.
        """
        self._shards[number] = writer.close()
        if self._journal_is_mine:
            append_line(self._journal, self._shards[number].model_dump_json())
            return
        # What an earlier attempt left may be damaged, or of another store.
        lines = [self._meta.model_dump_json(), *(shard.model_dump_json() for shard in self._shards.values())]
        write_whole(self._journal, "".join(f"{line}\n" for line in lines).encode())
        self._journal_is_mine = True

    def so_far(self) -> HiddenStateStore:
        """What is there, for reading; one shard at least."""
        shards = tuple(shard for _, shard in sorted(self._shards.items()))
        return HiddenStateStore(self._directory, StoreIndex(meta=self._meta, shards=shards))

    def finish(self) -> StoreIndex:
        """Write the index, which makes it a store."""
        assert not self.missing
        index = StoreIndex(meta=self._meta, shards=tuple(self._shards[number] for number in range(len(self._plan))))
        write_whole(self._directory / INDEX, index.model_dump_json(indent=1).encode())
        self._journal.unlink(missing_ok=True)
        return index

    def _sound_shards(self) -> dict[int, ShardEntry]:
        """The noted shards whose bytes are those written, of the rows planned."""
        meta, noted = self._noted()
        if meta is None:
            return {}
        if difference := self._meta.contradiction(meta):
            self.redone.append(f"{self._directory} holds shards of another store: their states have {difference}")
            return {}
        numbers = {shard_name(number): number for number in range(len(self._plan))}
        found = {}
        for shard in noted:
            number = numbers.get(shard.file)
            if number is None or shard.rows != row_entries(self._plan[number]):
                self.redone.append(f"{self._directory / shard.file} holds other rows than are to be extracted now")
                continue
            self._on_shard()
            try:
                self._check(shard, self._plan[number])
            except (BadData, OSError) as error:
                self.redone.append(str(error))
            else:
                found[number] = shard
        return found

    def _noted(self) -> tuple[StoreMeta | None, Sequence[ShardEntry]]:
        """What index or journal say; the last line of a journal may be torn."""
        with suppress(BadData):
            index = read_index(self._directory)
            return index.meta, index.shards
        lines: list[bytes] = []
        at = 0
        while more := complete_lines(self._journal, at):
            lines += [line for _, line in more]
            at = more[-1][0]
        try:
            meta = StoreMeta.model_validate_json(lines[0]) if lines else None
            return meta, [ShardEntry.model_validate_json(line) for line in lines[1:]]
        except ValidationError as error:
            self.redone.append(f"{self._journal} is damaged: {error.errors(include_url=False)[0]['msg']}")
            return None, []

    def _check(self, shard: ShardEntry, rows: Sequence[NumberedRow]) -> None:
        store = HiddenStateStore(self._directory, StoreIndex(meta=self._meta, shards=(shard,)))
        check_digest(self._directory / shard.file, shard)
        for (ids, mask), (_, row) in zip(store.masks(), rows, strict=True):
            if not (torch.equal(ids, row.token_ids_T) and torch.equal(mask, row.loss_mask_T)):
                raise BadData(f"{self._directory / shard.file} holds other tokens than are to be extracted now")
