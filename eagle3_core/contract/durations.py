"""Durations as people write them: `90`, `90s`, `1.5h`. Standard library only."""

import re

_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_PATTERN = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(ms|s|min|m|h|d)?", re.ASCII)

FORMS = "seconds, or a number with ms, s, m, h or d: 90, 90s, 30m"


def parse_duration(text: str) -> float:
    """Seconds.

    Raises:
        ValueError: it is no duration; the message says what one looks like.
    """
    found = _PATTERN.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text[:40]!r} is no duration; write {FORMS}")
    return float(found[1]) * _UNITS[found[2] or ""]
