"""Opening files below a directory without following a link anywhere on the way.

Each part is opened relative to the descriptor of the one before it, and none may be a link. So a part that is swapped
for a link between a check and the opening leads nowhere: the open fails.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_beneath(root: Path, path: Path) -> BinaryIO:
    """A regular file below `root`, opened for reading.

    Args:
        root: a directory of the daemon's own, links in which were resolved when it started.
        path: lies below it by its text.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: a part of the path is a link (ELOOP, or ENOTDIR within), or the file is not a regular one.
    """
    parts = path.relative_to(root).parts
    if not parts or ".." in parts:
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    directory = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            inner = os.open(part, flags, dir_fd=directory)
            os.close(directory)
            directory = inner
        # Without waiting: the open of a named pipe would last until somebody writes to it.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(parts[-1], flags, dir_fd=directory)
    finally:
        os.close(directory)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")
