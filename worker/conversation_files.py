"""Files of conversations, opened: JSONL or Parquet, plain, .gz or .zst; row by row, so that memory does not grow.

Only complete files are read to their end without a word: one that stops inside its compressed data is an error that
names the last line read.
"""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from eagle3_core.contract.jsonfiles import LFS_POINTER
from eagle3_core.data.conversations import FORMS, KEYS, Row, parse_line, parse_row
from eagle3_core.errors import BadData, BadInput, BadRow

PARQUET_ROWS = 256
"""Rows decoded at a time."""

MAX_LINE_BYTES = 64 << 20
"""A longer line is no conversation; it is not held in memory."""

CHUNK_BYTES = 1 << 18

_MAGIC = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"PAR1": ".parquet"}
"""Sources: RFC 1952, RFC 8878, https://parquet.apache.org/docs/file-format/."""

_OTHERS = {
    LFS_POINTER: "a Git LFS pointer, not the file; run `git lfs pull`",
    b"\xff\xfe": "UTF-16; write UTF-8",
    b"\xfe\xff": "UTF-16; write UTF-8",
    b"BZh": "a bzip2 file; .gz and .zst can be read",
    b"\xfd7zXZ": "an xz file; .gz and .zst can be read",
    b"PK\x03\x04": "a zip archive; .gz and .zst can be read",
    b"ARROW1": "an Arrow file; write JSONL or Parquet",
    b"<!DOCTYPE": "a web page; the download went wrong",
    b"<html": "a web page; the download went wrong",
}
"""What other files begin with."""

_BOM = b"\xef\xbb\xbf"


class ConversationFile:
    """A file of conversations, read once from its beginning. `size` and `position` are in `unit`s."""

    def __init__(self, path: Path) -> None:
        """Look at the file; it is opened by `rows`.

        Raises:
            BadInput: it is a directory, not there or of another kind, or its format needs a package that is missing.
        """
        if not path.is_file():
            raise BadInput(f"{path} is {'not a file' if path.exists() else 'missing'}")
        self.path = path
        self._kind = _kind_of(path)
        self.is_parquet = self._kind == ".parquet"
        self.unit = "rows" if self.is_parquet else "kB"
        self._raw: io.BufferedReader | None = None
        self._rows_read = 0
        self._parquet = _open_parquet(path) if self.is_parquet else None
        self.size = self._parquet.metadata.num_rows if self._parquet else -(-path.stat().st_size // 1000)

    @property
    def position(self) -> int:
        """How much of it was read."""
        if self.is_parquet or self._raw is None:
            return self._rows_read
        return self.size if self._raw.closed else -(-self._raw.tell() // 1000)

    def rows(self) -> Iterator[tuple[int, Row | BadRow]]:
        """(line, or row of a Parquet file, from 1; what it holds) in order. Blank lines are passed over.

        Raises:
            BadData: the file stops inside its compressed data, or is no such file.
        """
        return self._parquet_rows() if self.is_parquet else self._lines()

    def _lines(self) -> Iterator[tuple[int, Row | BadRow]]:
        number = 0
        with ExitStack() as opened:
            self._raw = opened.enter_context(self.path.open("rb"))
            stream = opened.enter_context(_decompressed(self.path, self._kind, self._raw))
            try:
                while raw := stream.readline(MAX_LINE_BYTES):
                    number += 1
                    if number == 1:
                        raw = raw.removeprefix(_BOM)
                    if len(raw) == MAX_LINE_BYTES:
                        while raw and not raw.endswith(b"\n"):
                            raw = stream.readline(MAX_LINE_BYTES)
                        text = f"longer than {MAX_LINE_BYTES >> 20} MiB; write one row a line"
                        yield number, BadRow("too_long", text, damaged=True)
                        continue
                    if raw.strip():
                        yield number, _parsed(raw)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise BadData(f"{self.path}: the compressed data is damaged behind line {number} ({error})") from error

    def _parquet_rows(self) -> Iterator[tuple[int, Row | BadRow]]:
        import pyarrow  # noqa: PLC0415 - only where there is such a file

        assert self._parquet is not None
        there = self._parquet.schema_arrow.names
        if not set(FORMS) & set(there):
            raise BadData(f"{self.path}: no column is called {', '.join(FORMS)}; there are {', '.join(there)[:200]}")
        columns = [name for name in KEYS if name in there]
        try:
            for batch in self._parquet.iter_batches(batch_size=PARQUET_ROWS, columns=columns):
                for row in _rows_of(batch):
                    self._rows_read += 1
                    yield self._rows_read, row
        except (pyarrow.ArrowException, OSError) as error:
            _raise_os_errors(error)
            why = " ".join(str(error).split())
            raise BadData(f"{self.path}: damaged behind row {self._rows_read} ({why})") from error


def read_conversations(path: Path) -> Iterator[tuple[int, Row]]:
    """(line number, row) of each line of a file; the first that cannot be used ends it.

    Raises:
        BadData: a row cannot be used, or the file is damaged; names file and line.
    """
    for number, row in ConversationFile(path).rows():
        if isinstance(row, BadRow):
            raise BadRow(row.reason, f"{path}, line {number}: {row}", row.damaged)
        yield number, row


def _parsed(raw: bytes) -> Row | BadRow:
    try:
        return parse_line(raw.rstrip(b"\r\n"))
    except BadRow as error:
        return error


def _rows_of(batch: Any) -> list[Row | BadRow]:
    """The rows of a record batch; where its values cannot all be decoded, each by itself."""
    try:
        return [_decoded(value) for value in batch.to_pylist()]
    except ValueError as error:  # no UTF-8, or a time that Python cannot hold
        if batch.num_rows > 1:
            return [row for number in range(batch.num_rows) for row in _rows_of(batch.slice(number, 1))]
        reason = "not_utf8" if isinstance(error, UnicodeDecodeError) else "not_a_row"
        return [BadRow(reason, f"a value cannot be decoded ({error})", damaged=True)]


def _decoded(value: Any) -> Row | BadRow:
    try:
        return parse_row(_without_nulls(value))
    except BadRow as error:
        return error


def _without_nulls(value: Any) -> Any:
    """A column of objects has the keys of all its rows; those that a row lacks come as null."""
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _kind_of(path: Path) -> str:
    """By the first bytes, whatever the name; by the name where they say nothing.

    Raises:
        BadInput: a file of another kind.
    """
    with path.open("rb") as file:
        begin = file.read(32)
    if other := next((what for magic, what in _OTHERS.items() if begin.startswith(magic)), None):
        raise BadInput(f"{path}: is {other}")
    kinds = (kind for magic, kind in _MAGIC.items() if begin.startswith(magic))
    return next(kinds, path.suffix.lower())


def _decompressed(path: Path, kind: str, raw: io.BufferedReader) -> io.BufferedReader | gzip.GzipFile:
    if kind == ".gz":
        return gzip.GzipFile(fileobj=raw)
    return io.BufferedReader(_ZstdReader(path, raw), CHUNK_BYTES) if kind == ".zst" else raw


class _ZstdReader(io.RawIOBase):
    """Frames one after the other; one that is cut raises, which the library's own reader does not."""

    def __init__(self, path: Path, raw: io.BufferedReader) -> None:
        try:
            import zstandard  # noqa: PLC0415 - only where there is such a file
        except ImportError as error:
            raise BadInput(f"{path}: the package zstandard is needed to read it: pip install zstandard") from error
        self._raw, self._library = raw, zstandard
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._begun, self._ready = False, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame, self._begun = self._library.ZstdDecompressor().decompressobj(), False
            data = data or self._raw.read(CHUNK_BYTES)
            if not data:
                if self._begun:
                    raise EOFError("it ends inside a frame")
                return 0
            self._begun = True
            try:
                self._ready = self._frame.decompress(data)
            except self._library.ZstdError as error:
                raise EOFError(str(error)) from error
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def _open_parquet(path: Path) -> Any:
    try:
        import pyarrow  # noqa: PLC0415 - only where there is such a file
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError as error:
        raise BadInput(f"{path}: the package pyarrow is needed to read it: pip install pyarrow") from error
    try:
        return pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)
    except (pyarrow.ArrowException, OSError) as error:
        _raise_os_errors(error)
        why = " ".join(str(error).split())
        raise BadData(f"{path}: not a Parquet file, or one that is cut or encrypted ({why})") from error


def _raise_os_errors(error: Exception) -> None:
    """Pass on what the system said; where pyarrow dislikes bytes, its OSError has no number."""
    if isinstance(error, OSError) and error.errno is not None:
        raise error
