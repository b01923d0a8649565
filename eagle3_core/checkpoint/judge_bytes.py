"""The judge on bytes: each file read once, in order, with its digests and every look at its values taken on the way.

safetensors, manifest of version 2    header | tensor | tensor ...      a digest of each; together they are the file
anything else that is listed          [ the whole file ]                one digest; tensors only to name a fault
torch.save, not listed                record | record ...               the archive's own CRC-32
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from eagle3_core.checkpoint.archive import Archive
from eagle3_core.checkpoint.digest import Hasher, hasher
from eagle3_core.checkpoint.findings import Report
from eagle3_core.checkpoint.judge_files import CONFIG_NAME, add_unreadable
from eagle3_core.checkpoint.manifest import Manifest
from eagle3_core.checkpoint.stream import OpenFile, Stream
from eagle3_core.errors import UnreadableFile


@dataclass
class Part:
    """One tensor of a file, and who looks at its bytes.

    name: as findings name it; `stored`: in the file.
    row_bytes: pieces end at multiples of it.
    looks: called with each piece; `done` once all were.
    digest: of its bytes, where it was taken.
    """

    name: str
    stored: str
    start: int
    end: int
    row_bytes: int = 1
    looks: list[Callable[[memoryview], None]] = field(default_factory=list)
    done: list[Callable[[OpenFile], None]] = field(default_factory=list)
    digest: str | None = None


def read_file(
    report: Report, path: Path, parts: list[Part], manifest: Manifest | None, archive: Archive | None, stream: Stream
) -> None:
    """Read a file from its first byte to its last; compare its digests, and have its parts looked at.

    Args:
        report: where findings go.
        path: the file.
        parts: its tensors.
        manifest: of its checkpoint.
        archive: set for a file of torch.save.
        stream: reads it.
    """
    try:
        _Reading(report, path, parts, manifest, archive, stream).run()
    except UnreadableFile as error:
        add_unreadable(report, error)
    except OSError as error:
        report.add("missing_file", f"{path.name} cannot be read: {error.strerror}", file=path)


class _Reading:
    def __init__(
        self,
        report: Report,
        path: Path,
        parts: list[Part],
        manifest: Manifest | None,
        archive: Archive | None,
        stream: Stream,
    ) -> None:
        self._report, self._path, self._stream = report, path, stream
        self._parts = sorted(parts, key=lambda part: (part.start, part.end))
        self._size = path.stat().st_size
        entry = None if manifest is None else manifest.files.get(path.name)
        self._header = manifest.headers.get(path.name) if manifest is not None and parts else None
        self._tensors = {} if manifest is None else manifest.tensors.get(path.name, {})
        # Of another size it is a finding already, and config.json is compared by what it says.
        by_content = path.name == CONFIG_NAME and manifest is not None and manifest.config is not None
        self._expected = None
        if entry is not None and entry.size == self._size and self._header is None and not by_content:
            self._expected = entry.digest
        self._whole = None if self._expected is None else hasher(_algorithm(self._expected))
        self._checksums = None if self._expected or archive is None else _Checksums(archive)

    def run(self) -> None:
        with self._stream.opened(self._path) as file:
            position = 0
            for part in self._parts:
                if part.start > position:
                    self._between(file, position, part.start)
                self._read_part(file, part, again=part.start < position)
                position = max(position, part.end)
            self._between(file, position, self._size)
            if self._whole is not None and self._expected is not None:
                self._compare_whole(file, self._whole, self._expected)
        if self._checksums is not None:
            self._report_checksums(self._checksums)

    def _between(self, file: OpenFile, start: int, end: int) -> None:
        """Bytes of no tensor: a header, a pickle, padding."""
        digest = hasher(_algorithm(self._header)) if self._header is not None and start == 0 else None
        for offset, piece in _with_offsets(file, start, end):
            self._take(offset, piece)
            if digest is not None:
                digest.update(piece)
        if digest is not None and self._header is not None and _written(digest, self._header) != self._header:
            what = (
                f"{self._path.name} was written anew: its header is another one; names, dtypes, shapes and bytes decide"
            )
            self._report.add("rewritten", what, file=self._path)

    def _read_part(self, file: OpenFile, part: Part, again: bool) -> None:
        """One tensor; `again` where its bytes were read before, as those of another one in the same storage."""
        entry = self._tensors.get(part.stored) if self._header is not None else None
        expected = None if entry is None else entry.digest
        digest = hasher(_algorithm(expected)) if expected is not None else None
        for offset, piece in _with_offsets(file, part.start, part.end, part.row_bytes):
            if not again:
                self._take(offset, piece)
            if digest is not None:
                digest.update(piece)
            for look in part.looks:
                look(piece)
        for done in part.done:
            done(file)
        if digest is not None and expected is not None:
            part.digest = _written(digest, expected)
            if part.digest != expected:
                self._changed(part, "bytes differ")

    def _take(self, offset: int, piece: memoryview) -> None:
        if self._whole is not None:
            self._whole.update(piece)
        if self._checksums is not None:
            self._checksums.update(offset, piece)

    def _compare_whole(self, file: OpenFile, digest: Hasher, expected: str) -> None:
        if _written(digest, expected) == expected:
            return
        changed = []
        for part in self._parts:
            recorded = self._tensors.get(part.stored)
            if recorded is None:
                continue
            again = hasher(_algorithm(recorded.digest))
            for piece in file.pieces(part.start, part.end):
                again.update(piece)
            if _written(again, recorded.digest) != recorded.digest:
                changed.append(part)
        for part in changed:
            self._changed(part, "bytes differ")
        if not changed:
            self._changed(None, "its header differs" if self._tensors and self._parts else "bytes differ")

    def _changed(self, part: Part | None, what: str) -> None:
        name = self._path.name if part is None else part.name
        tensor = None if part is None else part.name
        self._report.add("digest_differs", f"{name}: {what} from what was written", file=self._path, tensor=tensor)

    def _report_checksums(self, checksums: "_Checksums") -> None:
        for start, end in checksums.wrong:
            names = [part.name for part in self._parts if part.start < end and start < part.end]
            self._report.add(
                "checksum_differs",
                f"{', '.join(names[:3]) or 'a tensor'}: bytes differ from the checksum in the file",
                file=self._path,
                tensor=names[0] if names else None,
            )


class _Checksums:
    """The CRC-32 of an archive's records, as its bytes go by in order."""

    def __init__(self, archive: Archive) -> None:
        self._left = [record for record in archive.records if record.crc and record.end > record.start]
        self._crc = 0
        self.wrong: list[tuple[int, int]] = []

    def update(self, offset: int, piece: memoryview) -> None:
        """Take in the bytes at an offset."""
        end = offset + len(piece)
        while self._left and self._left[0].start < end:
            record = self._left[0]
            self._crc = zlib.crc32(piece[max(record.start - offset, 0) : record.end - offset], self._crc)
            if record.end > end:
                return
            if self._crc != record.crc:
                self.wrong.append((record.start, record.end))
            self._crc = 0
            self._left.pop(0)


def _with_offsets(file: OpenFile, start: int, end: int, row_bytes: int = 1) -> Iterator[tuple[int, memoryview]]:
    offset = start
    for piece in file.pieces(start, end, row_bytes):
        yield offset, piece
        offset += len(piece)


def _algorithm(digest: str) -> str:
    return digest.partition(":")[0]


def _written(digest: Hasher, like: str) -> str:
    """A digest as manifests write it."""
    return f"{_algorithm(like)}:{digest.hexdigest()}"
