"""The judge on a checkpoint beside the epoch before: what moved, what should not have, and how far."""

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from eagle3_core.checkpoint.archive import read_archive
from eagle3_core.checkpoint.findings import Report
from eagle3_core.checkpoint.judge_bytes import Part
from eagle3_core.checkpoint.judge_files import CONFIG_NAME, changed_keys, flat_config
from eagle3_core.checkpoint.judge_state import OPTIMIZER_NAME, OptimizerState, parse_state
from eagle3_core.checkpoint.judge_tensors import FLOATS
from eagle3_core.checkpoint.manifest import Manifest, read_manifest
from eagle3_core.checkpoint.stream import Stream
from eagle3_core.checkpoint.weights import DrafterWeights, Entry, open_drafter_weights
from eagle3_core.contract.drafter_keys import means_nothing
from eagle3_core.contract.jsonfiles import read_json_object
from eagle3_core.contract.weight_files import TensorLocation
from eagle3_core.errors import BadInput, UnreadableFile
from eagle3_core.verifier.tensors import TORCH_DTYPES

EMBED_TOKENS = "embed_tokens.weight"
HEAD = "lm_head.weight"
NOT_TRAINED = frozenset({EMBED_TOKENS, "d2t", "t2d"})
"""What training leaves alone, unless the embedding is trained: a drafter's embedding and vocabulary map."""

_WORD = 8
_SPANS, _SPAN_BYTES = 64, 1024
_SAME_TENSOR, _OTHER_TENSOR = 0.8, 0.5
"""Cosine between samples of one tensor a step of training apart is near 1, between two tensors near 0."""

_KEPT = 0.9
"""Where most matrices are nearer to themselves than that, one that is not near at all was put in another's place."""

_SCALE = 4.0
_NEARER = 2.0
"""Of two vectors that were swapped, times by which each is nearer to what the other was; by chance it is below 1."""


class Previous:
    """The checkpoint of the epoch before, to be compared tensor by tensor while the judged one is read.

    Raises:
        BadInput: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights = open_drafter_weights(path)
        manifest = read_manifest(path) if path.is_dir() else None
        self._manifest = manifest if isinstance(manifest, Manifest) else None
        self._stream = Stream()
        self.same: set[str] = set()
        self.lost: str | None = None

    def watch(self, name: str, entry: Entry, part: Part, manifest: Manifest | None) -> None:
        """Have a tensor compared: by digests where both checkpoints recorded them, else byte by byte."""
        other = self.weights.entries.get(name)
        if other is None or (entry.dtype, entry.shape) != (other.dtype, other.shape) or other.location is None:
            return
        then, now = _recorded(self._manifest, other), _recorded(manifest, entry)
        if then is not None and now is not None and then.partition(":")[0] == now.partition(":")[0]:
            if then == now:
                self.same.add(name)
            return
        look = _Equal(self._stream, other.location, part.row_bytes)

        def compare(raw: memoryview) -> None:
            try:
                look.update(raw)
            except UnreadableFile as error:  # it may be cleared away meanwhile: no fault of the one that is judged
                look.equal, self.lost = False, str(error)

        part.looks.append(compare)
        part.done.append(lambda _: self.same.add(name) if look.equal else None)


def _recorded(manifest: Manifest | None, entry: Entry) -> str | None:
    recorded = None if manifest is None else manifest.tensors.get(entry.file.name, {}).get(entry.stored_name)
    return None if recorded is None else recorded.digest


class _Equal:
    """Whether bytes that go by are those of another file; reads on only as long as they are."""

    def __init__(self, stream: Stream, location: TensorLocation, row_bytes: int) -> None:
        self.equal = True
        self._pieces = _pieces(stream, location, row_bytes)

    def update(self, raw: memoryview) -> None:
        if self.equal:
            self.equal = _same(raw, next(self._pieces))


def _pieces(stream: Stream, location: TensorLocation, row_bytes: int) -> Iterator[memoryview]:
    with stream.opened(location.file) as file:
        yield from file.pieces(location.info.start, location.info.end, row_bytes)


def _same(one: memoryview, other: memoryview) -> bool:
    words = len(one) // _WORD * _WORD  # torch compares words at memory speed, Python bytes do not
    if words and not torch.equal(
        torch.frombuffer(one[:words], dtype=torch.int64), torch.frombuffer(other[:words], dtype=torch.int64)
    ):
        return False
    return bytes(one[words:]) == bytes(other[words:])


def check_against_previous(
    report: Report,
    directory: Path,
    weights: DrafterWeights,
    previous: Previous,
    state: OptimizerState | None,
    frozen: frozenset[str],
) -> None:
    """Weights that training should have moved, those it should not, and how far.

    Args:
        report: where findings go.
        directory: the judged checkpoint.
        weights: its tensors.
        previous: the checkpoint before, after every tensor was watched.
        state: the optimizer, which knows what is trained; None: all but `frozen` is.
        frozen: what no training changes.
    """
    if previous.lost is not None:
        report.add("previous_unreadable", f"the previous checkpoint could not be read: {previous.lost}")
        return
    same, name_before = previous.same, previous.path.name
    trained = None if state is None else state.trained
    both = weights.entries.keys() & previous.weights.entries.keys()
    moving = (both - frozen) if trained is None else (both & trained)
    still = sorted(moving & same)
    if moving and len(still) == len(moving):
        names = ", ".join(still[:3])
        report.add(
            "weights_unchanged",
            f"all {len(still)} trained tensors are the same as in {name_before}: {names} ...",
            file=weights.files[0],
            tensor=still[0],
        )
    else:
        for name in still:
            report.add(
                "tensor_unchanged", f"{name} is the same as in {name_before}", file=weights.files[0], tensor=name
            )
    for name in sorted((both & frozen) - same):
        code = "map_changed" if name in ("d2t", "t2d") else "frozen_tensor_changed"
        report.add(code, f"{name} differs from {name_before}", file=weights.files[0], tensor=name)
    try:
        _compare_values(report, weights, previous, sorted(both - frozen - same))
        _compare_steps(report, state, previous.path)
    except OSError as error:
        report.add("previous_unreadable", f"the previous checkpoint could not be read: {error}")
    _compare_configs(report, directory, previous.path)


def _compare_values(report: Report, weights: DrafterWeights, previous: Previous, moved: list[str]) -> None:
    """Size and direction of samples of each tensor against the epoch before."""
    before = previous.weights.entries
    old = {name: sample for name in moved if (sample := _sample(before[name])) is not None}
    own: dict[str, float] = {}
    for name in moved:
        entry, new = weights.entries[name], _sample(weights.entries[name])
        if new is None or name not in old or entry.shape != before[name].shape or not bool(torch.isfinite(new).all()):
            continue
        size, size_before = _rms(new), _rms(old[name])
        if size_before > 0 and not 1 / _SCALE <= size / size_before <= _SCALE:
            report.add(
                "distribution_shift",
                f"{name} has root mean square {size:.3g}, {size_before:.3g} in {previous.path.name}",
                file=entry.file,
                tensor=name,
            )
        if len(entry.shape) > 1:
            own[name] = _cosine(new, old[name])
    for name in (name for name, cosine in own.items() if cosine < _OTHER_TENSOR):
        new, others = _sample(weights.entries[name]), [cosine for other, cosine in own.items() if other != name]
        alike = (other for other in own if other != name and before[other].shape == before[name].shape)
        swapped = next((other for other in alike if new is not None and _cosine(new, old[other]) > _SAME_TENSOR), None)
        alone = sum(cosine > _KEPT for cosine in others) * 2 > len(others)
        code = "tensors_swapped" if swapped is not None else "matrix_replaced" if alone else "unlike_previous"
        what = f"is turned away (cosine {own[name]:.2f}) from itself" if swapped is None else f"is what {swapped} was"
        what = f"{name} {what} in {previous.path.name}{', and most others are not' if alone else ''}"
        report.add(code, what, file=weights.entries[name].file, tensor=name)
    vectors = {name: _sample(weights.entries[name]) for name in old if len(before[name].shape) == 1}
    for name, other in _swapped_vectors({name: now for name, now in vectors.items() if now is not None}, old):
        file = weights.entries[name].file
        report.add("tensors_swapped", f"{name} is what {other} was in {previous.path.name}", file=file, tensor=name)


def _swapped_vectors(now: dict[str, Tensor], old: dict[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Norms and biases of which each is nearer to what the other was: all of them point the same way, near ones."""
    for one, other in combinations(sorted(now), 2):
        if not now[one].shape == now[other].shape == old[one].shape == old[other].shape:
            continue
        own = min(float((now[name] - old[name]).norm()) for name in (one, other))
        crossed = max(float((now[one] - old[other]).norm()), float((now[other] - old[one]).norm()))
        if crossed * _NEARER < own:
            yield from ((one, other), (other, one))


def _sample(entry: Entry) -> Tensor | None:
    """float32 [S], the same places of every tensor of this shape, spread over it."""
    if entry.location is None or entry.dtype not in FLOATS or 0 in entry.shape:
        return None
    info, dtype = entry.location.info, TORCH_DTYPES[entry.dtype]
    span = _SPAN_BYTES // 4 * dtype.itemsize
    length = info.end - info.start
    if length <= _SPANS * span:
        starts, span = [info.start], length
    else:
        last = (length - span) // dtype.itemsize
        starts = [info.start + last * step // (_SPANS - 1) * dtype.itemsize for step in range(_SPANS)]
    with entry.file.open("rb") as file:
        raw = bytearray()
        for start in starts:
            file.seek(start)
            raw += file.read(span)
    return torch.frombuffer(raw, dtype=dtype).float()


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _cosine(one: Tensor, other: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one, other, dim=0))


def _compare_configs(report: Report, directory: Path, previous: Path) -> None:
    try:
        now, then = (flat_config(read_json_object(d / CONFIG_NAME)) for d in (directory, previous))
    except BadInput:
        return  # told where it is read
    keys = [key for key in changed_keys(now, then) if not means_nothing(key, now, then)]
    if keys:
        report.add(
            "config_changed",
            f"config.json differs from {previous.name} in {', '.join(keys)}",
            file=directory / CONFIG_NAME,
        )


def _compare_steps(report: Report, state: OptimizerState | None, previous: Path) -> None:
    """An optimizer that did not step since the epoch before is that one's."""
    file = previous / OPTIMIZER_NAME
    try:
        earlier = parse_state(read_archive(file))
    except UnreadableFile:
        return
    now, then = (None if one is None else one.last_step() for one in (state, earlier))
    if state is not None and now is not None and then is not None and now <= then:
        report.add(
            "optimizer_stale",
            f"the optimizer stands at step {now:g}, that of {previous.name} at {then:g}",
            file=state.archive.path,
        )
