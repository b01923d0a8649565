"""The hidden-state store: safetensors shards and an index that says what they hold.

    <store>/
      index.json               what the states are, and where each row lies; written last
      shard_00000.safetensors  token_ids int64 [n], loss_mask bool [n], hidden_states [n, A + 1, H]

n tokens of all rows of a shard one behind the other, A aux states in the order of `layer_ids`, then the last state.
A row or a slice of one is read by its bytes alone.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from eagle3_core.contract.headers import TensorFile, TensorInfo, read_header
from eagle3_core.contract.jobdir import write_whole
from eagle3_core.contract.store_files import INDEX, RowEntry, ShardEntry, StoreIndex, StoreMeta, read_index
from eagle3_core.contract.weight_files import TensorLocation
from eagle3_core.errors import BadData, UnreadableFile
from eagle3_core.verifier.tensors import load_tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class StoredRow:
    """One sequence: token_ids int64 [T], loss_mask bool [T], aux [T, A, H], last [T, H]; `where`: shard and row."""

    where: str
    token_ids_T: Tensor
    loss_mask_T: Tensor
    aux_TAH: Tensor
    last_TH: Tensor


class StoreWriter:
    """Collects rows into shards; the index appears when all is on disk."""

    def __init__(self, directory: Path, meta: StoreMeta, shard_bytes: int) -> None:
        self._directory, self._meta, self._shard_bytes = directory, meta, shard_bytes
        self._pending: list[tuple[RowEntry, StoredRow]] = []
        self._pending_bytes = 0
        self._shards: list[ShardEntry] = []

    def add(self, row: int, prompt: str, token_ids_T: Tensor, loss_mask_T: Tensor, states_TLH: Tensor) -> None:
        """Take one row; states_TLH is [T, A + 1, H], aux states in order, the last state behind them.

        Raises:
            BadData: the states have another shape, are not finite, or are all zero in a slot.
        """
        check_states(states_TLH, len(token_ids_T), self._meta, f"row {row}")
        states = states_TLH.to(DTYPES[self._meta.dtype])
        entry = RowEntry(row=row, start=0, length=len(token_ids_T), prompt=prompt)
        self._pending.append((entry, StoredRow(f"row {row}", token_ids_T, loss_mask_T, states[:, :-1], states[:, -1])))
        self._pending_bytes += states.numel() * states.element_size()
        if self._pending_bytes >= self._shard_bytes:
            self._flush()

    def finish(self) -> StoreIndex:
        """Write what is left and the index.

        Raises:
            BadData: no row was added.
        """
        if self._pending:
            self._flush()
        if not self._shards:
            raise BadData("no row was extracted: the prepared data is empty")
        index = StoreIndex(meta=self._meta, shards=tuple(self._shards))
        write_whole(self._directory / INDEX, index.model_dump_json(indent=1).encode())
        return index

    def _flush(self) -> None:
        rows = [row for _, row in self._pending]
        states = [torch.cat((row.aux_TAH, row.last_TH[:, None]), dim=1) for row in rows]
        data = save(
            {
                "token_ids": torch.cat([row.token_ids_T for row in rows]).to(torch.int64),
                "loss_mask": torch.cat([row.loss_mask_T for row in rows]).to(torch.bool),
                "hidden_states": torch.cat(states).contiguous(),
            },
            metadata={"format": "pt"},
        )
        name = f"shard_{len(self._shards):05d}.safetensors"
        write_whole(self._directory / name, data)
        entries, start = [], 0
        for entry, _ in self._pending:
            entries.append(entry.model_copy(update={"start": start}))
            start += entry.length
        self._shards.append(
            ShardEntry(file=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest(), rows=tuple(entries))
        )
        self._pending, self._pending_bytes = [], 0


def check_states(states_TLH: Tensor, length: int, meta: StoreMeta, where: str) -> None:
    """Refuse states that cannot be what was asked for.

    Raises:
        BadData: wrong length or shape, NaN or Inf (with slot and counts), or a slot or token that is all zero.
    """
    slots = [*(f"layer {layer}" for layer in meta.layer_ids), f"last state ({meta.last_layer_id})"]
    if len(states_TLH) != length:
        raise BadData(f"{where}: {len(states_TLH)} hidden states for {length} tokens; extract the row again")
    if states_TLH.shape[1:] != (len(slots), meta.hidden_size):
        raise BadData(
            f"{where}: hidden states of shape {list(states_TLH.shape)}, expected "
            f"[{length}, {len(slots)}, {meta.hidden_size}]"
        )
    for slot, name in enumerate(slots):
        part = states_TLH[:, slot]
        low, high = torch.aminmax(part)
        if not (torch.isfinite(low) and torch.isfinite(high)):
            nan, inf = int(part.isnan().sum()), int(part.isinf().sum())
            raise BadData(f"{where}: {nan} NaN and {inf} Inf among the states of {name}; extract the row again")
        if low == 0 and high == 0:
            raise BadData(f"{where}: the states of {name} are all zero; the verifier did not fill them")
        # Only the embedding of an unused token may be zero.
        empty = (part[:, 0] == 0).nonzero()[:, 0] if slot or meta.layer_ids[0] else part.new_empty(0, dtype=torch.int64)
        empty = empty[(part[empty] == 0).all(dim=1)]
        if len(empty):
            raise BadData(
                f"{where}: the states of {name} are all zero at {len(empty)} of {length} tokens, the first is token "
                f"{int(empty[0])}; the verifier did not fill them, extract the row again"
            )


class HiddenStateStore:
    """A finished store, opened for reading. Rows are numbered 0 .. len - 1 in the order they were written."""

    def __init__(self, directory: Path) -> None:
        """Open and check index, shard sizes and shard headers; the states themselves are checked when read.

        Raises:
            BadData: index or shards are missing, damaged or contradict each other.
        """
        self.directory = directory
        self.index = read_index(directory)
        self._files = [open_shard(directory, shard, self.index.meta) for shard in self.index.shards]
        self._rows = [(number, row) for number, shard in enumerate(self.index.shards) for row in shard.rows]

    @property
    def meta(self) -> StoreMeta:
        """What the states are."""
        return self.index.meta

    @property
    def entries(self) -> list[RowEntry]:
        """Every row's place, in order."""
        return [row for _, row in self._rows]

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, number: int, max_seq_len: int | None = None) -> StoredRow:
        """One row, cut to its first `max_seq_len` tokens; reads just those bytes.

        Raises:
            BadData: the shard was cut meanwhile, or states are not finite or all zero; names shard, row and slot.
        """
        shard, row = self._rows[number]
        file = self._files[shard]
        length = min(row.length, max_seq_len or row.length)
        span = (row.start, row.start + length)
        try:
            states, ids, mask = (_span(file, name, *span) for name in ("hidden_states", "token_ids", "loss_mask"))
        except UnreadableFile as error:
            raise BadData(f"{error}; extract again") from error
        where = f"{file.path}, row {row.row}"
        check_states(states, length, self.meta, where)
        return StoredRow(where, ids, mask, states[:, :-1], states[:, -1])

    def masks(self, max_seq_len: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """(token_ids int64 [T], loss_mask bool [T]) of every row, without reading any state."""
        for shard, row in self._rows:
            span = (row.start, row.start + min(row.length, max_seq_len or row.length))
            file = self._files[shard]
            yield _span(file, "token_ids", *span), _span(file, "loss_mask", *span)


def _span(file: TensorFile, name: str, start: int, end: int) -> Tensor:
    """Rows start .. end - 1 of a tensor, by their bytes."""
    info = file.tensors[name]
    row_bytes = (info.end - info.start) // info.shape[0]
    part = TensorInfo(
        info.dtype, (end - start, *info.shape[1:]), info.start + start * row_bytes, info.start + end * row_bytes
    )
    return load_tensor(TensorLocation(name, file.path, part))


def open_shard(directory: Path, shard: ShardEntry, meta: StoreMeta) -> TensorFile:
    """The header of a shard, if file, entry and `meta` agree; no state is read.

    Raises:
        BadData: they do not, or the file is missing or damaged.
    """
    path = directory / shard.file
    if Path(shard.file).name != shard.file:
        raise BadData(f"{directory / INDEX} names the shard {shard.file!r}, which is not a plain file name")
    if not path.exists():
        raise BadData(f"{path} is missing, though {INDEX} lists it; extract again")
    if path.stat().st_size != shard.bytes:
        raise BadData(f"{path} has {path.stat().st_size} bytes, {INDEX} says {shard.bytes}; extract again")
    try:
        file = read_header(path)
    except UnreadableFile as error:
        raise BadData(str(error)) from error
    tokens = max((row.start + row.length for row in shard.rows), default=0)
    kind = "F32" if meta.dtype == "float32" else "BF16"
    wanted = {
        "token_ids": ("I64", (tokens,)),
        "loss_mask": ("BOOL", (tokens,)),
        "hidden_states": (kind, (tokens, len(meta.layer_ids) + 1, meta.hidden_size)),
    }
    for name, (dtype, shape) in wanted.items():
        info = file.tensors.get(name)
        if info is None or (info.dtype, info.shape) != (dtype, shape):
            found = "absent" if info is None else f"{info.dtype} {list(info.shape)}"
            raise BadData(f"{path}: tensor {name} is {found}, {INDEX} implies {dtype} {list(shape)}")
    return file
