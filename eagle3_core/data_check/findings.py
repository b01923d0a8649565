"""Findings on rows: of each code the first few are named, the rest are counted."""

from collections import Counter
from collections.abc import Collection
from pathlib import Path

from eagle3_core.checkpoint.findings import Report

NAMED = 8
"""A store of a million rows with one fault each is told in a page."""


class RowFindings:
    """Adds findings to a report, a few of each code."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self._seen: Counter[str] = Counter()

    def add(self, code: str, message: str, *, file: Path | str = "", tensor: str | None = None) -> None:
        """Note a finding, or count it where enough of its code were named."""
        self._seen[code] += 1
        if self._seen[code] <= NAMED:
            self.report.add(code, message, file=file, tensor=tensor)

    def finish(self) -> None:
        """Say how many were only counted."""
        for code, seen in self._seen.items():
            if seen > NAMED:
                self.report.add(code, f"and {seen - NAMED} more")


def missing_rows(present: Collection[int], count: int) -> str | None:
    """`2 of 6 rows (3, 5)`: which of the rows 0 .. count - 1 are not among those present; None where all are."""
    there = sorted({row for row in present if 0 <= row < count})
    if len(there) == count:
        return None
    named: list[int] = []
    for before, after in zip([-1, *there], [*there, count], strict=True):
        named.extend(range(before + 1, min(after, before + 1 + NAMED - len(named))))
    missing = count - len(there)
    more = ", ..." if missing > len(named) else ""
    return f"{missing} of {count} rows ({', '.join(map(str, named))}{more})"
