"""Time: the wall clock for people, CLOCK_BOOTTIME for durations."""

import time
from datetime import UTC, datetime


def utc_now() -> datetime:
    """The present, aware, UTC."""
    return datetime.now(UTC)


def boottime() -> float:
    """Seconds since boot, sleep included; no clock change moves it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
