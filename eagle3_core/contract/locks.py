"""Whether somebody holds an advisory lock. Standard library only."""

import fcntl
import os
from pathlib import Path


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock; a file that is not there is held by nobody."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
