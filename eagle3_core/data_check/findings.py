"""Findings on rows: of each code the first few are named, the rest are counted."""

from collections import Counter
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
