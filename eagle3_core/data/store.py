"""The hidden-state store: safetensors shards and an index that says what they hold. Written by store_writer.py.

    <store>/
      index.json               what the states are, and where each row lies; written last
      shard_00000.safetensors  token_ids int64 [n], hidden_states [n, A + 1, H], loss_mask bool [n], and for float8_e4m3
                               states scales float32 [n, A + 1] (fp8.py); its metadata holds what the states are as well

n tokens of all rows of a shard one behind the other, A aux states in the order of `layer_ids`, then the last state.
A row or a slice of one is read by its bytes alone.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from blake3 import blake3
from pydantic import ValidationError
from torch import Tensor

from eagle3_core.contract.headers import TensorFile, TensorInfo, read_header
from eagle3_core.contract.store_files import INDEX, RowEntry, ShardEntry, StoreIndex, StoreMeta, read_index
from eagle3_core.contract.weight_files import TensorLocation
from eagle3_core.data.fp8 import FP8, dequantise
from eagle3_core.errors import BadData, UnreadableFile
from eagle3_core.verifier.tensors import load_tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8_e4m3": FP8}
KINDS = {"float32": "F32", "bfloat16": "BF16", "float8_e4m3": "F8_E4M3"}
"""What safetensors calls each."""

META_KEY = "eyas_states"
"""Where the metadata of a shard's header holds its StoreMeta."""

_PIECE_BYTES = 1 << 24


@dataclass(frozen=True)
class StoredRow:
    """One sequence: token_ids int64 [T], loss_mask bool [T], aux [T, A, H], last [T, H]; `where`: shard and row."""

    where: str
    token_ids_T: Tensor
    loss_mask_T: Tensor
    aux_TAH: Tensor
    last_TH: Tensor


def check_tokens(asked_T: Tensor, seen_T: Tensor, where: str) -> None:
    """Refuse states that were made for other tokens than the row holds.

    Args:
        asked_T: int64 [T], the row's.
        seen_T: int64 [T'], what the states were made for.
        where: names the row.

    Raises:
        BadData: names both lengths, or the first position where they differ.
    """
    if len(asked_T) != len(seen_T):
        raise BadData(f"{where}: states of {len(seen_T)} tokens, the row has {len(asked_T)}; extract the row again")
    differing = (asked_T != seen_T).nonzero()[:, 0].tolist()
    if differing:
        first = differing[0]
        raise BadData(
            f"{where}: the states are those of another text: token {first} is {int(seen_T[first])}, the row has "
            f"{int(asked_T[first])} there; {len(differing)} of {len(asked_T)} differ; extract the row again"
        )


def suspicious(states_NLH: Tensor) -> bool:
    """Whether `check_states` would find something among these states, or might; costs one pass over them.

    Args:
        states_NLH: float [n, L, H].
    """
    low, high = torch.aminmax(states_NLH)
    return not bool(torch.isfinite(low) & torch.isfinite(high)) or bool((states_NLH[..., 0] == 0).any())


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
    if suspicious(states_TLH):
        for slot, name in enumerate(slots):
            _check_slot(states_TLH[:, slot], name, f"{where}: ", may_be_zero=not slot and not meta.layer_ids[0])


def _check_slot(states_TH: Tensor, name: str, where: str, may_be_zero: bool) -> None:
    if not bool(states_TH.isfinite().all()):
        nan, inf = int(states_TH.isnan().sum()), int(states_TH.isinf().sum())
        raise BadData(f"{where}{nan} NaN and {inf} Inf among the states of {name}; extract the row again")
    empty = (states_TH == 0).all(dim=1).nonzero()[:, 0].tolist()
    if len(empty) == len(states_TH):
        raise BadData(f"{where}the states of {name} are all zero; the verifier did not fill them")
    if empty and not may_be_zero:  # only the embedding of an unused token is
        raise BadData(
            f"{where}the states of {name} are all zero at {len(empty)} of {len(states_TH)} tokens, the first is token "
            f"{empty[0]}; the verifier did not fill them, extract the row again"
        )


class HiddenStateStore:
    """A finished store, opened for reading. Rows are numbered 0 .. len - 1 in the order they were written."""

    def __init__(self, directory: Path, index: StoreIndex | None = None) -> None:
        """Open and check index, shard sizes and shard headers; the states themselves are checked when read.

        Args:
            directory: the store.
            index: what index.json would say of one that is not finished.

        Raises:
            BadData: index or shards are missing, damaged or contradict each other.
        """
        self.directory = directory
        self.index = index or read_index(directory)
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
        """One row, cut to its first `max_seq_len` tokens; reads just those bytes. float8_e4m3 states come as bfloat16.

        Raises:
            BadData: the shard was cut meanwhile, or states are not finite or all zero; names shard, row and slot.
        """
        shard, row = self._rows[number]
        file = self._files[shard]
        length = min(row.length, max_seq_len or row.length)
        span = (row.start, row.start + length)
        try:
            states, ids, mask = (_span(file, name, *span) for name in ("hidden_states", "token_ids", "loss_mask"))
            if states.dtype == FP8:
                states = dequantise(states, _span(file, "scales", *span))
        except UnreadableFile as error:
            raise BadData(f"{error}; extract again") from error
        where = f"{file.path}, row {row.row}"
        check_states(states, length, self.meta, where)
        return StoredRow(where, ids, mask, states[:, :-1], states[:, -1])

    def tokens(self, number: int, max_seq_len: int | None = None) -> tuple[Tensor, Tensor]:
        """(token_ids int64 [T], loss_mask bool [T]) of one row, without reading any state."""
        shard, row = self._rows[number]
        span = (row.start, row.start + min(row.length, max_seq_len or row.length))
        file = self._files[shard]
        return _span(file, "token_ids", *span), _span(file, "loss_mask", *span)

    def masks(self, max_seq_len: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """`tokens` of every row."""
        return (self.tokens(number, max_seq_len) for number in range(len(self)))


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
    _check_meaning(file, meta)
    tokens = max((row.start + row.length for row in shard.rows), default=0)
    for name, (dtype, shape) in shard_tensors(tokens, meta).items():
        info = file.tensors.get(name)
        if info is None or (info.dtype, info.shape) != (dtype, shape):
            found = "absent" if info is None else f"{info.dtype} {list(info.shape)}"
            raise BadData(f"{path}: tensor {name} is {found}, {INDEX} implies {dtype} {list(shape)}")
    return file


def shard_tensors(tokens: int, meta: StoreMeta) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(safetensors dtype, shape) of each tensor of a shard, in the order they lie."""
    slots = len(meta.layer_ids) + 1
    scales = {"scales": ("F32", (tokens, slots))} if meta.dtype == "float8_e4m3" else {}
    return {
        "token_ids": ("I64", (tokens,)),
        "hidden_states": (KINDS[meta.dtype], (tokens, slots, meta.hidden_size)),
        **scales,
        "loss_mask": ("BOOL", (tokens,)),
    }


def _check_meaning(file: TensorFile, meta: StoreMeta) -> None:
    """Refuse a shard of another store, though its tensors may look alike; older ones say nothing of themselves."""
    said = file.metadata.get(META_KEY)
    if said is None:
        return
    try:
        difference = meta.contradiction(StoreMeta.model_validate_json(said))
    except ValidationError as error:
        raise BadData(f"{file.path}: {META_KEY} in its metadata does not say what its states are: {error}") from error
    if difference is not None:
        raise BadData(f"{file.path} is a shard of another store: its states have {difference}; extract again")


def check_digest(path: Path, shard: ShardEntry) -> None:
    """Compare a shard's bytes with the digest noted when they were written.

    Raises:
        BadData: they differ.
        OSError: the file cannot be read.
    """
    digest, noted = (blake3(), shard.blake3) if shard.blake3 is not None else (hashlib.sha256(), shard.sha256)
    buffer = memoryview(bytearray(_PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while got := file.readinto(buffer):
            digest.update(buffer[:got])
    if digest.hexdigest() != noted:
        raise BadData(f"{path} is not what was written: its {digest.name} differs from that of {INDEX}; extract again")
