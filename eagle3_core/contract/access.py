"""Whether a path may be read or written, told with its owner and mode. Standard library only."""

import os
import pwd
from pathlib import Path


def unusable(path: Path, mode: int) -> str | None:
    """Why this process may not use a path, or None.

    Args:
        path: a file or directory; where there is none yet, the nearest directory above it counts.
        mode: os.R_OK to read it (and to list and enter a directory), os.W_OK to make files in it.
    """
    there = path
    while not os.path.exists(there) and there != there.parent:  # noqa: PTH110 - Path.exists raises some errors
        there = there.parent
    wanted = mode | (os.X_OK if there.is_dir() else 0)
    if mode == os.R_OK and there != path:
        wanted = os.X_OK  # that it is missing is somebody else's finding, unless it only cannot be seen
    if os.access(there, wanted, effective_ids=True):
        return None
    status = there.stat()
    verb = "read" if mode == os.R_OK else "written"
    where = "" if there == path else f" as {there}"
    return (
        f"{path} cannot be {verb}{where}: it belongs to {_name(status.st_uid)}, mode {status.st_mode & 0o7777:04o}, "
        f"and this process runs as {_name(os.geteuid())}"
    )


def _name(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"
