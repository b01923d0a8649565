"""The judge on the vocabulary map.

d2t int64 [D] holds offsets, target = draft + d2t[draft]; t2d bool [V] is true at exactly those targets.
Source: facts of the format as vLLM, SGLang and speculators read it: all three add d2t to the draft index.
"""

import torch
from torch import Tensor

from eagle3_core.checkpoint.findings import Report
from eagle3_core.checkpoint.weights import DrafterWeights, Entry
from eagle3_core.contract.drafter_files import DrafterSource


def check_map(report: Report, source: DrafterSource, weights: DrafterWeights, sound: set[str]) -> None:
    """d2t, t2d and draft_vocab_size against each other."""
    d2t_entry, t2d_entry = weights.entries.get("d2t"), weights.entries.get("t2d")
    if source.config.draft_vocab_size == source.config.vocab_size:
        return
    t2d = t2d_entry.load() if t2d_entry is not None and "t2d" in sound else None
    if t2d is not None and t2d_entry is not None:
        count = int(t2d.sum())
        if count != source.config.draft_vocab_size:
            report.add(
                "t2d_count",
                f"t2d is true at {count} tokens, draft_vocab_size is {source.config.draft_vocab_size}",
                file=t2d_entry.file,
                tensor="t2d",
            )
    if d2t_entry is not None and "d2t" in sound:
        _check_d2t(report, source, d2t_entry, d2t_entry.load(), t2d)


def _check_d2t(report: Report, source: DrafterSource, entry: Entry, d2t: Tensor, t2d: Tensor | None) -> None:
    """Findings from the gravest cause down; the first that explains the rest is the only one."""

    def add(code: str, message: str) -> None:
        report.add(code, message, file=entry.file, tensor="d2t")

    vocab_size, draft_size = source.config.vocab_size, len(d2t)
    targets = d2t + torch.arange(draft_size)
    wanted = None if t2d is None else t2d.nonzero().flatten()
    outside = (targets < 0) | (targets >= vocab_size)
    if not bool(d2t.any()):
        add(
            "identity_slice", f"d2t is all zero: draft ids stand for the tokens 0..{draft_size - 1}, an arbitrary slice"
        )
    elif _is_map(d2t, vocab_size, wanted) and (
        not _is_map(targets, vocab_size, wanted) or (wanted is None and _climbs_everywhere(d2t))
    ):
        add("d2t_absolute", "d2t looks absolute: it holds verifier ids where offsets (id - draft index) are meant")
    elif bool(outside.any()):
        first = int(outside.nonzero()[0])
        add(
            "d2t_out_of_range",
            f"d2t leads {int(outside.sum())} draft ids outside 0..{vocab_size - 1}, "
            f"the first is {first} -> {int(targets[first])}",
        )
    else:
        _check_targets(report, source, entry, targets, wanted)


def _check_targets(report: Report, source: DrafterSource, entry: Entry, targets: Tensor, wanted: Tensor | None) -> None:
    ordered = targets.sort().values
    doubles = ordered[1:][ordered[1:] == ordered[:-1]]
    if doubles.numel():
        token = int(doubles[0])
        places = (targets == token).nonzero().flatten().tolist()
        report.add(
            "d2t_duplicates",
            f"d2t leads to {doubles.numel()} tokens more than once, the first is {token}, from draft ids {places[:4]}",
            file=entry.file,
            tensor="d2t",
        )
    if wanted is not None and not torch.equal(torch.unique(ordered), wanted):
        extra = torch.unique(ordered[~torch.isin(ordered, wanted)])
        lacking = wanted[~torch.isin(wanted, ordered)]
        report.add(
            "d2t_t2d_differ",
            f"d2t and t2d contradict each other: d2t leads to {extra.numel()} tokens that t2d leaves out "
            f"{extra[:3].tolist()}, and misses {lacking.numel()} that t2d names {lacking[:3].tolist()}",
            file=entry.file,
            tensor="d2t",
        )
    elif not doubles.numel() and not torch.equal(ordered, targets):
        code = "d2t_not_ascending" if source.format == "speculators" else "d2t_order"
        place = int((targets[1:] < targets[:-1]).nonzero()[0]) + 1
        report.add(
            code,
            f"d2t does not ascend: draft id {place} stands for token {int(targets[place])}, the one before for "
            f"{int(targets[place - 1])}",
            file=entry.file,
            tensor="d2t",
        )


def _is_map(ids: Tensor, vocab_size: int, wanted: Tensor | None) -> bool:
    """Whether these could be the verifier tokens themselves: distinct, in range, and those of t2d where it is known."""
    if bool(((ids < 0) | (ids >= vocab_size)).any()):
        return False
    ordered = ids.sort().values
    if bool((ordered[1:] == ordered[:-1]).any()):
        return False
    return wanted is None or torch.equal(ordered, wanted)


def _climbs_everywhere(d2t: Tensor) -> bool:
    """Offsets that grow at every step would leave out every second token; absolute ids grow so by nature."""
    return len(d2t) >= 8 and bool((d2t[1:] > d2t[:-1]).all())
