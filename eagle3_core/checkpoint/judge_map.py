"""The judge on the vocabulary map.

d2t int64 [D] holds offsets, target = draft + d2t[draft]; t2d bool [V] is true at exactly those targets.
Source: facts of the format as vLLM, SGLang and speculators read it: all three add d2t to the draft index.
"""

import sys
from array import array
from collections.abc import Sequence
from itertools import compress, count, pairwise
from operator import add

from eagle3_core.checkpoint.findings import Report
from eagle3_core.checkpoint.judge_files import add_unreadable
from eagle3_core.checkpoint.weights import DrafterWeights, Entry
from eagle3_core.contract.drafter_files import DrafterSource
from eagle3_core.errors import UnreadableFile

_LARGEST = 1 << 24
"""Entries of a map; no vocabulary comes near."""


def check_map(report: Report, source: DrafterSource, weights: DrafterWeights, sound: set[str]) -> Sequence[int] | None:
    """d2t, t2d and draft_vocab_size against each other; returns the verifier token of each draft id where they agree.

    Args:
        report: where findings go.
        source: config.json as it was read.
        weights: the tensors.
        sound: those of them that have the shape and dtype they should have.
    """
    draft_size = source.config.draft_vocab_size
    if draft_size == source.config.vocab_size:
        return range(draft_size) if draft_size <= _LARGEST else None
    before = len(report.findings)
    t2d_entry, d2t_entry = (weights.entries.get(name) if name in sound else None for name in ("t2d", "d2t"))
    try:
        wanted = None if t2d_entry is None else _true_places(_bytes(t2d_entry))
        d2t = None if d2t_entry is None else read_offsets(d2t_entry)
    except UnreadableFile as error:
        add_unreadable(report, error)
        return None
    if wanted is not None and t2d_entry is not None and len(wanted) != draft_size:
        report.add(
            "t2d_count",
            f"t2d is true at {len(wanted)} tokens, draft_vocab_size is {draft_size}",
            file=t2d_entry.file,
            tensor="t2d",
        )
    if d2t_entry is None or d2t is None:
        return None
    targets = list(map(add, count(), d2t))
    _check_d2t(report, source, d2t_entry, d2t, targets, wanted)
    bad = any(finding.severity == "error" for finding in report.findings[before:])
    return None if bad else targets


def read_offsets(entry: Entry) -> Sequence[int]:
    """The values of d2t.

    Raises:
        UnreadableFile: it is no map, or the file ended early.
    """
    return _int64(_bytes(entry))


def _bytes(entry: Entry) -> bytes:
    if entry.location is None or entry.location.info.count > _LARGEST:
        raise UnreadableFile(entry.file, "bad_shape", f"tensor {entry.stored_name!r} is no map", entry.stored_name)
    info = entry.location.info
    with entry.file.open("rb") as file:
        file.seek(info.start)
        raw = file.read(info.end - info.start)
    if len(raw) != info.end - info.start:
        raise UnreadableFile(entry.file, "cut", f"ended inside tensor {entry.stored_name!r}", entry.stored_name)
    return raw


def _int64(raw: bytes) -> Sequence[int]:
    values = array("q")
    values.frombytes(raw)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _true_places(raw: bytes) -> list[int]:
    return list(compress(range(len(raw)), raw))


def _check_d2t(
    report: Report,
    source: DrafterSource,
    entry: Entry,
    d2t: Sequence[int],
    targets: list[int],
    wanted: list[int] | None,
) -> None:
    """Findings from the gravest cause down; the first that explains the rest is the only one."""

    def tell(code: str, message: str) -> None:
        report.add(code, message, file=entry.file, tensor="d2t")

    vocab_size = source.config.vocab_size
    outside = []
    if min(targets) < 0 or max(targets) >= vocab_size:
        outside = [index for index, target in enumerate(targets) if not 0 <= target < vocab_size]
    if not any(d2t):
        tell(
            "identity_slice",
            f"d2t is all zero: draft ids stand for the tokens 0..{len(d2t) - 1}, an arbitrary slice",
        )
    elif _is_map(d2t, vocab_size, wanted) and (
        not _is_map(targets, vocab_size, wanted) or (wanted is None and _climbs_everywhere(d2t))
    ):
        tell("d2t_absolute", "d2t looks absolute: it holds verifier ids where offsets (id - draft index) are meant")
    elif outside:
        tell(
            "d2t_out_of_range",
            f"d2t leads {len(outside)} draft ids outside 0..{vocab_size - 1}, "
            f"the first is {outside[0]} -> {targets[outside[0]]}",
        )
    else:
        _check_targets(report, source, entry, targets, wanted)


def _check_targets(
    report: Report, source: DrafterSource, entry: Entry, targets: list[int], wanted: list[int] | None
) -> None:
    distinct = set(targets)
    doubled = len(targets) - len(distinct)
    if doubled:
        ordered = sorted(targets)
        token = next(one for one, other in pairwise(ordered) if one == other)
        places = [index for index, target in enumerate(targets) if target == token]
        report.add(
            "d2t_duplicates",
            f"d2t leads to {doubled} tokens more than once, the first is {token}, from draft ids {places[:4]}",
            file=entry.file,
            tensor="d2t",
        )
    if wanted is not None and distinct != (named := set(wanted)):
        extra, lacking = sorted(distinct - named), sorted(named - distinct)
        report.add(
            "d2t_t2d_differ",
            f"d2t and t2d contradict each other: d2t leads to {len(extra)} tokens that t2d leaves out "
            f"{extra[:3]}, and misses {len(lacking)} that t2d names {lacking[:3]}",
            file=entry.file,
            tensor="d2t",
        )
    elif not doubled and targets != sorted(targets):
        # Whoever writes t2d takes the draft ids from it, in its order.
        in_order = wanted is not None or source.format in ("speculators", "specforge", "official-eagle")
        code = "d2t_not_ascending" if in_order else "d2t_order"
        place = next(index for index in range(1, len(targets)) if targets[index] < targets[index - 1])
        report.add(
            code,
            f"d2t does not ascend: draft id {place} stands for token {targets[place]}, the one before for "
            f"{targets[place - 1]}",
            file=entry.file,
            tensor="d2t",
        )


def _is_map(ids: Sequence[int], vocab_size: int, wanted: list[int] | None) -> bool:
    """Whether these could be the verifier tokens themselves: distinct, in range, and those of t2d where it is known."""
    if min(ids) < 0 or max(ids) >= vocab_size:
        return False
    distinct = set(ids)
    return len(distinct) == len(ids) and (wanted is None or distinct == set(wanted))


def _climbs_everywhere(d2t: Sequence[int]) -> bool:
    """Offsets that grow at every step would leave out every second token; absolute ids grow so by nature."""
    return len(d2t) >= 8 and all(after > before for before, after in pairwise(d2t))
