"""report.json of a prepared directory: what was read, kept and left out, and why."""

from dataclasses import dataclass, field
from typing import Any

SHOWN_LINES = 10
"""Lines named of each reason."""


@dataclass
class Tally:
    """Lines by reason: `count`, the first of them, and what was said of the first."""

    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, reason: str, line: int, message: str) -> None:
        """Note a line."""
        entry = self.found.setdefault(reason, {"count": 0, "lines": [], "example": f"line {line}: {message}"})
        entry["count"] += 1
        if len(entry["lines"]) < SHOWN_LINES:
            entry["lines"].append(line)

    @property
    def total(self) -> int:
        """Lines of all reasons."""
        return sum(entry["count"] for entry in self.found.values())

    def counts(self) -> dict[str, int]:
        """Count of each reason."""
        return {reason: entry["count"] for reason, entry in self.found.items()}

    def lines(self, reason: str) -> str:
        """The first lines of one reason, in words."""
        entry = self.found[reason]
        return f"lines {', '.join(map(str, entry['lines']))}{', ...' * (entry['count'] > len(entry['lines']))}"

    def example(self, reason: str) -> str:
        """What was said of the first line of one reason."""
        return str(self.found[reason]["example"])

    def commonest(self) -> str:
        """Every reason with its count, and an example of the one most lines have."""
        counts = self.counts()
        reasons = ", ".join(f"{reason} {count}" for reason, count in counts.items())
        return f"{reasons}; {self.example(max(counts, key=lambda reason: counts[reason]))}"


@dataclass
class Report:
    """Everything that was noticed of the rows."""

    rows_read: int = 0
    dropped: Tally = field(default_factory=Tally)
    damaged: Tally = field(default_factory=Tally)
    noted: Tally = field(default_factory=Tally)

    def to_dict(self, rows_kept: int) -> dict[str, Any]:
        """Content of report.json."""
        return {
            "format": "eyas-prepare-report",
            "schema_version": 1,
            "rows_read": self.rows_read,
            "rows_kept": rows_kept,
            "dropped": self.dropped.found,
            "damaged": self.damaged.found,
            "noted": self.noted.found,
        }
