"""Room on file systems: how much there is, what a directory takes, and a reserve for the daemon's own writes."""

import contextlib
import os
import stat
import threading
from pathlib import Path

from eagle3_core.contract.jobdir import is_full
from server.system import clock

STEP_BYTES = 1 << 18
"""Given up at a time, so that whoever fills the disk does not get all of it at once."""

REFILL_AFTER_S = 10.0


def existing(path: Path) -> Path:
    """The path itself, or the nearest directory above it that is there."""
    while not os.path.exists(path) and path != path.parent:  # noqa: PTH110 - Path.exists raises some errors
        path = path.parent
    return path


def free_bytes(path: Path) -> tuple[int, int]:
    """(number of the file system a path is or would be on, bytes free there for this user).

    Raises:
        OSError: it cannot be asked, such as a network mount that is gone.
    """
    there = existing(path)
    found = os.statvfs(there)
    return there.stat().st_dev, found.f_bavail * found.f_frsize


def taken_bytes(directory: Path) -> int:
    """Bytes of disk that everything in a directory takes, without what links lead to or vanishes meanwhile."""
    total = 0
    queue = [directory]
    while queue:
        with contextlib.suppress(OSError), os.scandir(queue.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    total += status.st_blocks * 512
                    if stat.S_ISDIR(status.st_mode):
                        queue.append(Path(entry.path))
    return total


class Reserve:
    """A file that only takes up room, given up bit by bit when the daemon itself cannot write, and made again later."""

    def __init__(self, path: Path, size: int) -> None:
        """`size` in bytes; 0 keeps none."""
        self._path, self._size = path, size
        self._lock = threading.Lock()
        self._refill_at = 0.0

    def make_room(self, failed: bool = False) -> None:
        """Give some up if the disk is nearly full, or a write has `failed`; take it back when there is plenty."""
        with self._lock, contextlib.suppress(OSError):
            held = self._path.stat().st_size if self._path.exists() else 0
            _, free = free_bytes(self._path)
            if failed or free < STEP_BYTES:
                if held:
                    os.truncate(self._path, max(0, held - STEP_BYTES))
                self._refill_at = clock.boottime() + REFILL_AFTER_S
            elif held < self._size and free > 2 * self._size - held and clock.boottime() >= self._refill_at:
                self._refill_at = clock.boottime() + REFILL_AFTER_S
                self._fill(held)

    def _fill(self, held: int) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self._size)
        except OSError as error:
            os.ftruncate(descriptor, held)  # what was taken before it failed
            if not is_full(error):
                raise
        finally:
            os.close(descriptor)
