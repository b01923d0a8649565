"""tqdm's progress bars, as they are written into a file.

` 12%|#2        | 3/25 [00:01<00:10,  2.20it/s, loss=5.1]`, with or without a description before it.
"""

import re
from dataclasses import dataclass

from worker.adapters.reading import NUMBER, Reading

_BAR = re.compile(
    r"(?:^|(?<=[: ]))\s{0,3}\d{1,3}%\|[^|]{0,400}\|\s*(?P<n>\d{1,15})/(?P<total>\d{1,15})\s"
    r"\[[\d:]{1,20}<(?P<left>[\d:]{1,20}|\?)"
    r"(?:, {0,4}(?:[\d.]{1,20}|\?)(?P<unit>[A-Za-z ]{1,20}/s|s/[A-Za-z ]{1,20}))?"
    r"(?P<rest>[^\]]{0,400})\]"
)
_LOSS = re.compile(rf"\bloss[=: ] ?({NUMBER})", re.IGNORECASE)


@dataclass(frozen=True)
class Bar:
    """One bar: its description, how far it is, seconds left, unit, and a loss among its postfixes."""

    description: str
    n: int
    total: int
    left_s: float | None
    unit: str | None
    loss: float | None


def find_bar(line: str) -> Bar | None:
    """The last bar in a line."""
    found = None
    for found in _BAR.finditer(line):  # noqa: B007 - the last one is wanted
        pass
    if found is None or not found["total"].strip("0"):
        return None
    unit = (found["unit"] or "").replace("/s", "").replace("s/", "").strip()
    loss = _LOSS.search(found["rest"])
    return Bar(
        line[: found.start()].strip().rstrip(":"),
        int(found["n"]),
        int(found["total"]),
        _seconds(found["left"]),
        None if unit in ("", "it") else unit,
        None if loss is None else float(loss[1]),
    )


def _seconds(text: str) -> float | None:
    if text == "?":
        return None
    seconds = 0
    for part in text.split(":"):
        seconds = seconds * 60 + int(part or 0)
    return float(seconds)


class Tqdm:
    """Any bar: the last one shown is where the program is."""

    def read(self, line: str) -> Reading | None:
        """The bar in the line."""
        bar = find_bar(line)
        if bar is None:
            return None
        return Reading(step=bar.n, steps=bar.total, loss=bar.loss, eta_s=bar.left_s, unit=bar.unit or "steps")
