"""Files read once, in order, into two buffers that are used again. Standard library only.

    a thread:   read piece 1 | read piece 2 | read piece 3 | ...
    the caller:              | look at 1    | look at 2    | look at 3

Where there is a rate to keep to, the caller reads as well.
`pread` and no mapping: a mapped file counts as memory of the process, and kills it when it is cut meanwhile.
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from eagle3_core.errors import UnreadableFile

PIECE_BYTES = 1 << 24
_AHEAD_BYTES = 4 * PIECE_BYTES
"""What the kernel is asked to fetch while a piece is looked at."""


class Stream:
    """Hands out files in pieces. Not to be shared between threads.

    Args:
        max_bytes_per_s: reads no faster than that on average; None: as fast as it can.
    """

    def __init__(self, max_bytes_per_s: float | None = None) -> None:
        self._buffers = [bytearray(), bytearray()]  # as large as the largest piece so far
        self._reader = ThreadPoolExecutor(1, "reader")  # as nice as the thread that first has it read
        self.newest: Future[memoryview] | None = None
        self._rate = max_bytes_per_s
        self._began = time.monotonic()
        self._read = 0

    @property
    def paced(self) -> bool:
        """Whether there is a rate to keep to: then one thread does it all, and takes a core's share but once."""
        return self._rate is not None

    @contextmanager
    def opened(self, path: Path) -> Iterator["OpenFile"]:
        """A file to take pieces from.

        Raises:
            UnreadableFile: it cannot be opened.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UnreadableFile(path, "unreadable", f"cannot be opened: {error.strerror}") from error
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            yield OpenFile(self, path, descriptor)
        finally:
            os.close(descriptor)

    def begin(self, path: Path, descriptor: int, offset: int, size: int) -> Future[memoryview]:
        """Have `size` bytes from `offset` on read; valid until the second piece behind this one is begun."""
        self._next_buffer()
        self.newest = self._reader.submit(self._fill, path, descriptor, offset, size)
        return self.newest

    def read(self, path: Path, descriptor: int, offset: int, size: int) -> memoryview:
        """The same at once, in the caller's thread."""
        self._next_buffer()
        self.newest = None
        return self._fill(path, descriptor, offset, size)

    def _next_buffer(self) -> None:
        if self.newest is not None:
            wait([self.newest])
        self._buffers.reverse()

    def _fill(self, path: Path, descriptor: int, offset: int, size: int) -> memoryview:
        if len(self._buffers[0]) < size:
            self._buffers[0] = bytearray(size)
        view = memoryview(self._buffers[0])[:size]
        done = 0
        os.posix_fadvise(descriptor, offset + size, _AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
        while done < size:
            try:
                got = os.preadv(descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise UnreadableFile(path, "unreadable", f"cannot be read: {error.strerror}") from error
            if got == 0:
                raise UnreadableFile(path, "cut", f"ended at byte {offset + done:,} while it was read")
            done += got
        self._read += size
        if self._rate is not None and (early := self._began + self._read / self._rate - time.monotonic()) > 0:
            time.sleep(early)
        return view


class OpenFile:
    """One file of a stream."""

    def __init__(self, stream: Stream, path: Path, descriptor: int) -> None:
        self._stream, self._path, self._descriptor = stream, path, descriptor

    def pieces(self, start: int, end: int, row_bytes: int = 1) -> Iterator[memoryview]:
        """The bytes from `start` to `end` in order, each piece valid until the next is asked for.

        Args:
            start: offset in the file.
            end: offset behind the last byte.
            row_bytes: pieces end at multiples of it, where one fits into a piece.

        Raises:
            UnreadableFile: the file ended early or cannot be read.
        """
        stream, size = self._stream, PIECE_BYTES // row_bytes * row_bytes or PIECE_BYTES
        if stream.paced or end - start <= size:
            for offset in range(start, end, size):
                yield stream.read(self._path, self._descriptor, offset, min(size, end - offset))
            return
        coming = stream.begin(self._path, self._descriptor, start, size)
        try:
            for offset in range(start, end, size):
                if stream.newest is not coming:  # something else was read meanwhile
                    coming = stream.begin(self._path, self._descriptor, offset, min(size, end - offset))
                piece = coming.result()
                if (following := offset + size) < end:
                    coming = stream.begin(self._path, self._descriptor, following, min(size, end - following))
                yield piece
        finally:
            wait([coming])  # the file is closed next
