"""Logs as bytes: by offset, from the end, as they grow. Nothing is kept between two questions but an offset.

raw file --read with a margin on both sides--> secrets overwritten, same length --view=clean--> text for a person

A log of any length, with lines of any length, costs the bytes that are asked for.
"""

import asyncio
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import BinaryIO

from server.domain.logtext import clean
from server.errors import Conflict
from server.services.runtime import Runtime
from server.system.beneath import open_beneath

BLOCK = 65_536
"""Bytes of one look backwards, and the least that are taken for a clean view: a shorter line is never torn."""

LOOK_BACK = 4096
"""Bytes before a clean piece that are looked at for the beginning of its line."""

HELD_S = 0.2
"""Seconds the last word of an unfinished line is held back: a secret may be half written."""

_LAST_WORD = re.compile(rb"[^\s]+\Z")


class View(StrEnum):
    """How a log is shown."""

    RAW = "raw"
    CLEAN = "clean"


@dataclass(frozen=True)
class LogPart:
    """Bytes of an attempt's log.

    Attributes:
        offset: raw byte they begin at.
        next_offset: raw byte to read on at.
        size: raw bytes there are now.
        attempt: 0: the job has none yet.
        complete: these are its last bytes, and no more will come.
        held: some at its end are held back for a moment.
    """

    data: bytes
    offset: int
    next_offset: int
    size: int
    attempt: int
    complete: bool
    held: bool = False


@dataclass(frozen=True)
class Log:
    """The log of an attempt, whether its file is there yet or not.

    Attributes:
        attempt: 0: the job has none yet.
        live: more may come.
    """

    runtime: Runtime
    job_id: str
    attempt: int
    live: bool

    def read(self, offset: int, limit: int, view: View = View.RAW, bell: asyncio.Event | None = None) -> LogPart:
        """Bytes from an offset, at most `limit`; of a clean view at most that many raw ones, or a block.

        The bell is rung when something is written after this look.

        Raises:
            Conflict: somebody put a link in its place.
        """
        with self._opened() as file:
            if file is None:
                return self._nothing(offset)
            if bell is not None:
                self.runtime.growth.watch(file, bell)
            size, end = self._extent(file)
            return self._part(file, offset, limit, size, end, view)

    def tail(self, lines: int, limit: int, view: View = View.RAW) -> LogPart:
        """The last lines, or as many of their bytes as `limit` allows."""
        with self._opened() as file:
            if file is None:
                return self._nothing(0)
            size, end = self._extent(file)
            return self._part(file, _begin_of_last(file, end, lines, limit), limit, size, end, view)

    def begin_of_last(self, lines: int, limit: int) -> int:
        """The offset `tail` begins at."""
        with self._opened() as file:
            return 0 if file is None else _begin_of_last(file, self._extent(file)[1], lines, limit)

    def extent(self) -> tuple[int, int]:
        """Bytes there are, and up to which they may be shown now."""
        with self._opened() as file:
            return (0, 0) if file is None else self._extent(file)

    def _nothing(self, offset: int) -> LogPart:
        return LogPart(b"", offset, offset, 0, self.attempt, complete=not self.live)

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO | None]:
        if self.attempt == 0:
            yield None
            return
        path = self.runtime.job_dir(self.job_id).attempt(self.attempt).log
        try:
            file = open_beneath(self.runtime.settings.jobs_dir, path)
        except FileNotFoundError:
            yield None
            return
        except OSError as error:
            text = f"the log of job {self.job_id} is not a file of its own any more: {error.strerror}"
            raise Conflict(text) from error
        with file:
            yield file

    def _extent(self, file: BinaryIO) -> tuple[int, int]:
        found = os.fstat(file.fileno())
        size = found.st_size
        if not self.live or not 0 <= time.time() - found.st_mtime < HELD_S:
            return size, size
        margin = self.runtime.redactor.margin
        file.seek(max(0, size - margin))
        word = _LAST_WORD.search(file.read(margin))
        return size, size if word is None else size - len(word[0])

    def _part(self, file: BinaryIO, offset: int, limit: int, size: int, end: int, view: View) -> LogPart:
        begin = min(offset, end)
        wanted = min(limit if view == View.RAW or limit == 0 else max(limit, BLOCK), end - begin)
        back = min(begin, max(self.runtime.redactor.margin, LOOK_BACK))
        file.seek(begin - back)
        # A secret may begin before these bytes, or end behind them.
        seen = self.runtime.redactor.data(file.read(back + wanted + self.runtime.redactor.margin if wanted else 0))
        data = seen[back : back + wanted]
        at_end = begin + len(data) >= end
        used = len(data)
        if view == View.CLEAN:
            before = seen[max(0, back - LOOK_BACK) : back]
            data, used = clean(data, before, last=not self.live, at_end=at_end)
            data = self.runtime.redactor.data(data)  # colours may have kept one from being seen
        next_offset = begin + used if offset <= end else offset
        complete = not self.live and next_offset >= size
        return LogPart(data, max(begin, offset), next_offset, size, self.attempt, complete, held=end < size and at_end)


def _begin_of_last(file: BinaryIO, end: int, lines: int, limit: int) -> int:
    """Where the last so many lines begin, looked for backwards and no further than `limit` bytes."""
    floor = max(0, end - limit)
    if end == floor or lines == 0:
        return end
    file.seek(end - 1)
    place = end - 1 if file.read(1) == b"\n" else end  # this one ends the last line and begins none
    while place > floor:
        start = max(floor, place - BLOCK)
        file.seek(start)
        block = file.read(place - start)
        count = block.count(b"\n")
        if count >= lines:
            at = len(block)
            for _ in range(lines):
                at = block.rfind(b"\n", 0, at)
            return start + at + 1
        lines -= count
        place = start
    return floor
