"""Rows into packs of a token budget, packs into optimizer steps. Nothing is padded and nothing split."""

from collections.abc import Iterable, Iterator, Sequence

Pack = list[int]
"""Row numbers that go through the drafter together."""


def packs(rows: Iterable[int], lengths: Sequence[int], batch_tokens: int) -> Iterator[Pack]:
    """Rows in their order, each pack filled until the next row would exceed the budget; a longer row stands alone.

    What follows a pack's end does not depend on what came before it, so a run may go on behind any pack.
    """
    pack: Pack = []
    tokens = 0
    for row in rows:
        if pack and tokens + lengths[row] > batch_tokens:
            yield pack
            pack, tokens = [], 0
        pack.append(row)
        tokens += lengths[row]
    if pack:
        yield pack


def steps(rows: Iterable[int], lengths: Sequence[int], batch_tokens: int, accumulate: int) -> Iterator[list[Pack]]:
    """The packs of each optimizer step; the last one of an epoch may have fewer."""
    step: list[Pack] = []
    for pack in packs(rows, lengths, batch_tokens):
        step.append(pack)
        if len(step) == accumulate:
            yield step
            step = []
    if step:
        yield step
