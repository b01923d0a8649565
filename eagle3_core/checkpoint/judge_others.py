"""The judge on a checkpoint beside others: the epoch before, and the verifier it drafts for."""

import json
from pathlib import Path

import torch

from eagle3_core.checkpoint.findings import Report
from eagle3_core.checkpoint.weights import DrafterWeights, Entry, open_drafter_weights
from eagle3_core.contract.drafter_files import DrafterSource
from eagle3_core.contract.tensor_names import EMBEDDING
from eagle3_core.contract.verifier_config import read_verifier_config
from eagle3_core.contract.verifier_files import find_tensor
from eagle3_core.contract.weight_files import TensorLocation, read_weight_files
from eagle3_core.errors import BadInput
from eagle3_core.verifier.tensors import tensor_chunks

EMBED_TOKENS = "embed_tokens.weight"
NOT_TRAINED = frozenset({EMBED_TOKENS, "d2t", "t2d"})


def check_against_previous(
    report: Report,
    directory: Path,
    weights: DrafterWeights,
    previous: Path,
    trained: set[str] | None,
    frozen: frozenset[str] = NOT_TRAINED,
) -> None:
    """Weights that training should have moved, and those it should not.

    Args:
        report: where findings go.
        directory: the judged checkpoint.
        weights: its tensors.
        previous: the checkpoint before.
        trained: parameters the optimizer knows; None: all but `frozen`.
        frozen: what no training changes; by default a drafter's embedding, d2t and t2d.
    """
    try:
        earlier = open_drafter_weights(previous)
        same = {name for name, entry in weights.entries.items() if _equal(entry, earlier.entries.get(name))}
        _compare_configs(report, directory, previous)
    except BadInput as error:
        report.add("previous_unreadable", f"the previous checkpoint could not be read: {error}")
        return
    both = weights.entries.keys() & earlier.entries.keys()
    moving = (both - frozen) if trained is None else (both & trained)
    still = sorted(moving & same)
    if moving and len(still) == len(moving):
        names = ", ".join(still[:3])
        report.add(
            "weights_unchanged",
            f"all {len(still)} trained tensors are the same as in {previous.name}: {names} ...",
            file=weights.files[0],
            tensor=still[0],
        )
    else:
        for name in still:
            report.add(
                "tensor_unchanged", f"{name} is the same as in {previous.name}", file=weights.files[0], tensor=name
            )
    for name in sorted((both & frozen) - same):
        code = "map_changed" if name in ("d2t", "t2d") else "frozen_tensor_changed"
        report.add(code, f"{name} differs from {previous.name}", file=weights.files[0], tensor=name)


def _equal(one: Entry, other: Entry | None) -> bool:
    if other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    reader = _Reader(other)
    return all(
        torch.equal(piece.view(torch.uint8), reader.take(piece.numel()).view(torch.uint8)) for piece in one.chunks()
    )


def _compare_configs(report: Report, directory: Path, previous: Path) -> None:
    try:
        now, then = (json.loads((d / "config.json").read_bytes()) for d in (directory, previous))
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(now, dict) and isinstance(then, dict):
        keys = sorted(key for key in now.keys() | then.keys() if now.get(key) != then.get(key))
        if keys:
            report.add(
                "config_changed",
                f"config.json differs from {previous.name} in {', '.join(keys)}",
                file=directory / "config.json",
            )


def check_against_verifier(
    report: Report, directory: Path, source: DrafterSource, weights: DrafterWeights, verifier: Path
) -> None:
    """Sizes, layer ids and embedding against those of the verifier."""
    try:
        config = read_verifier_config(verifier)
        files = read_weight_files(verifier)
        embedding = find_tensor(EMBEDDING, files)
    except BadInput as error:
        report.add("verifier_unreadable", f"the verifier could not be read: {error}")
        return
    file = directory / "config.json"
    rows, hidden = embedding.info.shape[0], config.hidden_size
    vocab_size = config.vocab_size or rows
    drafter = source.config
    if drafter.vocab_size not in (vocab_size, rows):
        report.add("verifier_differs", f"vocab_size is {drafter.vocab_size}, the verifier's is {vocab_size}", file=file)
    width = source.target_hidden_size or drafter.hidden_size
    if width != hidden:
        key = "target_hidden_size" if source.target_hidden_size else "hidden_size"
        report.add("verifier_differs", f"{key} is {width}, the verifier's hidden_size is {hidden}", file=file)
    beyond = [index for index in drafter.aux_layer_ids or () if index > config.num_hidden_layers]
    if beyond:
        report.add(
            "aux_id_out_of_range",
            f"layer ids {beyond} are beyond the verifier's {config.num_hidden_layers} layers",
            file=file,
        )
    entry = weights.entries.get(EMBED_TOKENS)
    if entry is not None and len(entry.shape) == 2 and entry.shape[1] == hidden and len(embedding.info.shape) == 2:
        _compare_embedding(report, entry, embedding, drafter.own_embedding)


def _compare_embedding(report: Report, entry: Entry, verifier: TensorLocation, trained: bool) -> None:
    """Row by row in the drafter's precision; rows the other does not have are padding."""
    columns = entry.shape[1]
    reader = _Reader(entry)
    wanted = min(entry.shape[0], verifier.info.shape[0])
    different = compared = 0
    first = None
    for piece in tensor_chunks(verifier):
        theirs = piece.view(-1, columns)[: wanted - compared]
        if not len(theirs):
            break
        ours = reader.take(theirs.numel()).view(-1, columns)
        unequal = (ours != theirs.to(ours.dtype)).any(dim=1)
        if bool(unequal.any()):
            first = compared + int(unequal.nonzero()[0]) if first is None else first
            different += int(unequal.sum())
        compared += len(theirs)
    if different:
        report.add(
            "own_embedding" if trained else "embedding_differs",
            f"embed_tokens.weight differs from the verifier's {verifier.name} in {different} of {compared} rows, "
            f"the first is {first}",
            file=entry.file,
            tensor=EMBED_TOKENS,
        )


class _Reader:
    """Hands out a tensor in pieces of any length, though it is read in pieces of its own."""

    def __init__(self, entry: Entry) -> None:
        self._chunks = entry.chunks()
        self._held = torch.empty(0)

    def take(self, count: int) -> torch.Tensor:
        """The next `count` values; valid until the next call."""
        parts: list[torch.Tensor] = []
        while count:
            if not len(self._held):
                self._held = next(self._chunks)
            part, self._held = self._held[:count], self._held[count:]
            count -= len(part)
            # The next piece overwrites the buffer this one lies in.
            parts.append(part.clone() if count else part)
        return parts[0] if len(parts) == 1 else torch.cat(parts)
