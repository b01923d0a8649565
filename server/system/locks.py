"""Advisory locks: one daemon per state directory, one process life per attempt."""

import fcntl
import os
from pathlib import Path


def take(path: Path) -> int | None:
    """A descriptor that holds the lock, not inherited by programs started later; None when somebody else holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def release(descriptor: int) -> None:
    """Let go of the daemon's own hold; a process it was handed to keeps the lock."""
    os.close(descriptor)
