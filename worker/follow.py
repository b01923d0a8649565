"""Following a log that somebody else writes: its new lines, in little memory, whatever is written.

    bytes -> lines (\\n) -> of each, the last few things a screen would have shown one over the other (\\r) -> text

A line is kept up to MAX_LINE bytes, the rest of it is passed over. Holes are skipped. A file that was cut short is
read from its new beginning; one that was replaced is read to its end first, then the one that took its name.
"""

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

CHUNK = 1 << 18
MAX_LINE = 8192
MAX_BEHIND = 64 << 20
"""Bytes; of more than that, only the last ones are read."""

KEPT = 3
"""Segments between carriage returns that are kept of a line: a bar, what cleared it, and what was printed over it."""

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


class LineSplitter:
    """Bytes in, lines of text out."""

    def __init__(self) -> None:
        self._segment = b""
        self._shown: list[bytes] = []
        self._returned = False
        self._seen = b""

    def feed(self, data: bytes) -> Iterator[str]:
        """Lines that `data` completes."""
        *complete, rest = data.split(b"\n")
        for part in complete:
            self._grow(part)
            yield from self.flush()
        self._grow(rest)

    def shown(self) -> Iterator[str]:
        """What a screen shows by now of an unfinished line that carriage returns began anew: bars, while they grow."""
        shown, self._shown = self._shown, []
        if self._returned and self._segment != self._seen:
            self._seen = self._segment
            shown.append(self._segment)
        yield from _texts(shown)

    def flush(self) -> Iterator[str]:
        """The line as far as it goes."""
        rest = [] if self._segment == self._seen else [self._segment]
        shown, self._shown, self._segment = [*self._shown, *rest], [], b""
        self._returned, self._seen = False, b""
        yield from _texts(shown)

    def _grow(self, part: bytes) -> None:
        before, returned, after = part.rpartition(b"\r")
        if not returned:
            self._segment += part[: MAX_LINE - len(self._segment)]
            return
        self._returned, self._seen = True, b""
        # Of a storm of bars only the end can matter; one that is cut at its front is passed over by its reader.
        segments = (self._segment + before if len(before) < MAX_LINE else before[-KEPT * MAX_LINE :]).split(b"\r")
        spoken = [segment[:MAX_LINE] for segment in segments if segment.strip()]
        self._shown = [*self._shown, *spoken][-KEPT:]
        self._segment = after[:MAX_LINE]


def _texts(segments: list[bytes]) -> Iterator[str]:
    for segment in segments[-KEPT:]:
        text = _CONTROLS.sub("", _ESCAPES.sub("", segment.decode(errors="replace"))).rstrip()
        if text.strip():
            yield text


class LogFollower:
    """Reads on where it stopped. Not to be shared between threads."""

    def __init__(self, path: Path, offset: int = 0, by_name: bool = False) -> None:
        """Follow a file.

        Args:
            path: the file; it may appear later.
            offset: byte to begin at.
            by_name: another file that takes the name is followed in its turn, but no link that does: it could lead
                where nobody looked when the job was submitted.
        """
        self._path, self._offset, self._by_name = path, offset, by_name
        self._flags = os.O_NOFOLLOW if by_name else 0
        self._fd: int | None = None
        self._lines = LineSplitter()
        self.skipped = 0

    def lines(self) -> Iterator[str]:
        """Lines that came since the last time, as far as the file goes now."""
        if self._fd is None and not self._open():
            return
        yield from self._read()
        if self._by_name and self._replaced():
            yield from self._read()
            yield from self._lines.flush()
            self.close()
            self._offset = 0
            if self._open():
                yield from self._read()
        yield from self._lines.shown()

    def rest(self) -> Iterator[str]:
        """What is left when nobody writes any more: new lines, and a last one without its end."""
        yield from self.lines()
        yield from self._lines.flush()

    def close(self) -> None:
        """Give the file back."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> bool:
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | self._flags)
        except OSError:
            return False
        return True

    def _read(self) -> Iterator[str]:
        assert self._fd is not None
        size = os.fstat(self._fd).st_size
        if size < self._offset:  # cut short, as copytruncate does
            self._offset = 0
            self._lines = LineSplitter()
        if size - self._offset > MAX_BEHIND:
            self.skipped += size - MAX_BEHIND - self._offset
            self._offset = size - MAX_BEHIND
            self._lines = LineSplitter()
        while self._offset < size:
            try:
                self._offset = os.lseek(self._fd, self._offset, os.SEEK_DATA)
                data = os.pread(self._fd, min(CHUNK, size - self._offset), self._offset)
            except OSError as error:
                if error.errno == errno.ENXIO:  # a hole to the end
                    self._offset = size
                return
            if not data:
                return
            self._offset += len(data)
            yield from self._lines.feed(data)

    def _replaced(self) -> bool:
        assert self._fd is not None
        try:
            now = self._path.stat()
        except OSError:
            return False
        was = os.fstat(self._fd)
        return (now.st_ino, now.st_dev) != (was.st_ino, was.st_dev)
