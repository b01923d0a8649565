"""Looking through directories, and removing them, without following links."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Entry:
    """A file or link: its path below the directory, size in bytes, time of its last change, and where a link leads."""

    path: str
    size: int
    modified_s: float
    target: str | None


def walk(directory: Path, most: int) -> Iterator[Entry]:
    """Every file and link in a directory, in no order; at most so many. What vanishes or cannot be read is left out."""
    queue = [directory]
    while queue:
        here = queue.pop()
        with contextlib.suppress(OSError), os.scandir(here) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        queue.append(Path(entry.path))
                        continue
                    if most <= 0:
                        return
                    most -= 1
                    status = entry.stat(follow_symlinks=False)
                    target = str(Path(entry.path).readlink()) if entry.is_symlink() else None
                    path = _text(os.path.relpath(entry.path, directory))
                    yield Entry(path, status.st_size, status.st_mtime, None if target is None else _text(target))


def _text(name: str) -> str:
    """A name that JSON can carry: bytes that are no UTF-8 are spelt out."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def remove_tree(directory: Path, last: str | None = None) -> None:
    """Remove a directory and all in it, the entry `last` at the end; one that is not there is removed already.

    Raises:
        OSError: something in it cannot be removed, or it is a link.
    """
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(directory) if last is not None else ():
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            elif entry.name != last:
                Path(entry.path).unlink()
        shutil.rmtree(directory)
