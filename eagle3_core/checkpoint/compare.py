"""Whether two checkpoints mean the same, whatever format, names, order of draft ids and files they come in.

    config     what a drafter computes: sizes, flags, states, rope ...; not what it is called or was written with
    map        the verifier tokens it can propose
    tensors    values, by canonical name; rows of lm_head by the token they stand for

Both are read piece by piece; memory does not grow with their size.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3_core.checkpoint.convert_source import Meaning, read_meaning
from eagle3_core.checkpoint.layer_ids import default_states
from eagle3_core.checkpoint.raw_tensors import RawTensor, copied, permuted
from eagle3_core.checkpoint.stream import PIECE_BYTES, Stream
from eagle3_core.checkpoint.weights import Entry
from eagle3_core.verifier.tensors import TORCH_DTYPES

_NOT_MEANING = frozenset({"aux_layer_ids", "bos_token_id", "eos_token_id"})
_SHOWN = 5
_STEP = PIECE_BYTES // 8
"""Elements that are compared at a time."""


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same: a config key, `d2t`, or a tensor; `max_abs` where values differ by a number."""

    what: str
    message: str
    max_abs: float | None = None


@dataclass(frozen=True)
class Comparison:
    """What differs, and in `notes` what is written differently and means the same."""

    differences: tuple[Difference, ...]
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether both mean the same."""
        return not self.differences

    def to_dict(self) -> dict[str, Any]:
        """`{"equal", "differences": [{"what", "message", "max_abs"}], "notes": [...]}`."""
        return {"equal": self.equal, "differences": [asdict(d) for d in self.differences], "notes": list(self.notes)}


def compare(one: Path, other: Path, *, verifier: Path | None = None, tolerance: float = 0.0) -> Comparison:
    """What two checkpoints differ in.

    Args:
        one: checkpoint directory of any format, or an output directory, whose latest epoch is taken.
        other: the same.
        verifier: their verifier: it says which states stand for ids that are not stated, and lends embedding and head
            to the one that has none.
        tolerance: largest difference between two values that still counts as equal, as after rounding to fewer bits.

    Raises:
        CheckpointError: one of them is damaged or can be read in two ways.
        UnreadableFile: a file ended early.
    """
    a, b = (read_meaning(path, verifier, states_needed=False) for path in (one, other))
    differences = [*_configs(a, b), *_maps(a, b)]
    notes = [f"formats: {a.source.format}, {b.source.format}"] if a.source.format != b.source.format else []
    if a.weights.entries.keys() >= {"lm_head.weight"} and _order(a) != _order(b) and not differences:
        notes.append("draft ids are in another order")
    for name in sorted((a.weights.entries.keys() | b.weights.entries.keys()) - {"d2t", "t2d"}):
        found = _tensors(a, b, name, tolerance, notes)
        if found is not None:
            differences.append(found)
    return Comparison(tuple(differences), tuple(notes))


def _configs(a: Meaning, b: Meaning) -> Iterator[Difference]:
    ours, theirs = dict(a.source.config), dict(b.source.config)
    for key in ours:
        if key not in _NOT_MEANING and ours[key] != theirs[key]:
            yield Difference(key, f"{_plain(ours[key])} and {_plain(theirs[key])}")
    if (first := _states(a)) != (second := _states(b)):
        yield Difference("eagle_aux_hidden_state_layer_ids", f"{first} and {second}")
    if a.parts.target_hidden_size != b.parts.target_hidden_size:
        yield Difference("target_hidden_size", f"{a.parts.target_hidden_size} and {b.parts.target_hidden_size}")
    if a.source.extras != b.source.extras:
        yield Difference("bias", f"{sorted(a.source.extras)} and {sorted(b.source.extras)}")


def _states(meaning: Meaning) -> str:
    """Its states; the servers' own where none are stated and the verifier is known."""
    if meaning.states is not None:
        return f"states {list(meaning.states)}"
    if meaning.source.captured_after:
        return "those of speculators 0.3"
    return "not stated" if meaning.layers is None else f"states {list(default_states(meaning.layers))}"


def _plain(value: object) -> object:
    return value.model_dump() if hasattr(value, "model_dump") else value


def _maps(a: Meaning, b: Meaning) -> Iterator[Difference]:
    ours, theirs = set(a.targets), set(b.targets)
    if ours != theirs:
        left, right = sorted(ours - theirs), sorted(theirs - ours)
        yield Difference(
            "d2t",
            f"{len(left)} tokens only the first can propose {left[:_SHOWN]}, {len(right)} only the second "
            f"{right[:_SHOWN]}",
        )


def _order(meaning: Meaning) -> list[int]:
    return sorted(range(len(meaning.targets)), key=meaning.targets.__getitem__)


def _tensors(a: Meaning, b: Meaning, name: str, tolerance: float, notes: list[str]) -> Difference | None:
    ours, theirs = _lent(a, name), _lent(b, name)
    if ours is None or theirs is None:
        holder = "first" if theirs is None else "second"
        frozen = name == "embed_tokens.weight" and not (a.source.config.own_embedding or b.source.config.own_embedding)
        if frozen:
            notes.append(f"{name} is only in the {holder}, and said to be the verifier's")
            return None
        return Difference(name, f"only in the {holder}")
    if name == "lm_head.weight" and set(a.targets) == set(b.targets) and len(ours.shape) == len(theirs.shape) == 2:
        raw = permuted(ours, _order(a)), permuted(theirs, _order(b))
    else:
        raw = copied(ours, _vocabulary(a, name)), copied(theirs, _vocabulary(b, name))
    if raw[0].shape != raw[1].shape:
        return Difference(name, f"shape {list(raw[0].shape)} and {list(raw[1].shape)}")
    dtypes = ours.dtype, theirs.dtype
    largest, count = _largest(raw)
    if count and not largest <= tolerance:
        kinds = f" ({dtypes[0]} and {dtypes[1]})" if dtypes[0] != dtypes[1] else ""
        return Difference(
            name, f"{count} values differ, by {largest:.6g} at most{kinds}", largest if isfinite(largest) else None
        )
    if count:
        notes.append(f"{name}: {count} values differ, by {largest:.6g} at most")
    elif dtypes[0] != dtypes[1]:
        notes.append(f"{name}: the same values as {dtypes[0]} and {dtypes[1]}")
    return None


def _vocabulary(meaning: Meaning, name: str) -> int | None:
    """Rows of an embedding, which a verifier may have padded."""
    return meaning.source.config.vocab_size if name == "embed_tokens.weight" else None


def _lent(meaning: Meaning, name: str) -> Entry | None:
    """A tensor of the checkpoint, else the one the verifier lends it."""
    entry, verifier = meaning.weights.entries.get(name), meaning.verifier
    if entry is not None or verifier is None:
        return entry
    lent = {"embed_tokens.weight": verifier.embedding, "lm_head.weight": verifier.head}.get(name)
    return None if lent is None else Entry(name, lent.file, lent.info.dtype, lent.info.shape, lent)


def _largest(raw: tuple[RawTensor, RawTensor]) -> tuple[float, int]:
    """Largest difference between the values of two tensors of one shape, and how many differ; NaN equals NaN."""
    largest, count = 0.0, 0
    pieces = (_bytes(one, _STEP * TORCH_DTYPES[one.dtype].itemsize) for one in raw)
    for left, right in zip(*pieces, strict=True):
        if left == right and raw[0].dtype == raw[1].dtype:
            continue
        first, second = _values(left, raw[0].dtype), _values(right, raw[1].dtype)
        apart = (first != second) & ~(first.isnan() & second.isnan())
        if apart.any():
            count += int(apart.sum())
            # NaN against a number is as far as can be.
            gap = (first - second)[apart].abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
            largest = max(largest, float(gap.max()))
    return largest, count


def _values(piece: bytes, dtype: str) -> Tensor:
    return torch.frombuffer(bytearray(piece), dtype=TORCH_DTYPES[dtype]).double()


def _bytes(raw: RawTensor, size: int) -> Iterator[bytes]:
    """The bytes of a tensor in pieces of one size, the last one shorter."""
    held = bytearray()
    # What a stream gave is overwritten by what it reads next, and two tensors are read in turn.
    for piece in raw.pieces(Stream()):
        held += piece
        while len(held) >= size:
            yield bytes(held[:size])
            del held[:size]
    if held:
        yield bytes(held)
