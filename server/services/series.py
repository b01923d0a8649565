"""Samples of one job on disk, thinned with age and bounded in size. One writer: the daemon's watcher thread.

    <state>/jobs/<id>/metrics/
      1s.jsonl     one row a look, for an hour
      10s.jsonl    one row for 10 s, for a day
      60s.jsonl    one row a minute, as long as there is room
      *.old.jsonl  the part before; a full part takes its place, so that a file is never rewritten

A file begins with {"names": [...]}; rows follow as [unix time, value, ...]. Rows of several looks hold means, and of
the names in MAXED the largest value, too, as `<name>_max`. What cannot be written is dropped, and no job the worse.

Bound: two parts of each file, and a part ends before a row would take it over its limit: MAX_BYTES in all.
"""

import errno
import json
import logging
import math
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

logger = logging.getLogger(__name__)

MIB = 1 << 20


@dataclass(frozen=True)
class Tier:
    """One file and its part before. `seconds` a row is for; a part ends after `span_s` or `part_bytes`."""

    seconds: int
    span_s: float
    part_bytes: int

    def file(self, directory: Path) -> Path:
        """The part that grows."""
        return directory / f"{self.seconds}s.jsonl"

    def parts(self, directory: Path) -> list[Path]:
        """Both, the older one first."""
        return [directory / f"{self.seconds}s.old.jsonl", self.file(directory)]


TIERS = (Tier(1, 3600, 4 * MIB), Tier(10, 86_400, 8 * MIB), Tier(60, math.inf, 16 * MIB))
MAX_BYTES = sum(2 * tier.part_bytes for tier in TIERS)
"""56 MiB a job: with one GPU about a year, with eight two months."""

MAXED = ("memory_used", "job_memory", "utilization_percent", "temperature_c", "power_w", "ram_used", "cpu_percent")
"""Last parts of names whose largest value matters as well as the mean."""


def _is_maxed(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in MAXED


@dataclass
class _Bucket:
    """Looks of one span of time, on their way to one row."""

    start: float = -1.0
    count: dict[str, int] = field(default_factory=dict)
    total: dict[str, float] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)

    def add(self, values: Mapping[str, float | None]) -> None:
        """One look more."""
        for name, value in values.items():
            if value is None:
                self.count.setdefault(name, 0)
                continue
            self.count[name] = self.count.get(name, 0) + 1
            self.total[name] = self.total.get(name, 0.0) + value
            if _is_maxed(name):
                self.largest[name] = max(value, self.largest.get(name, value))

    def row(self) -> dict[str, float | None]:
        """Means, and the largest values of some."""
        found: dict[str, float | None] = {}
        for name, count in self.count.items():
            found[name] = self.total[name] / count if count else None
            if _is_maxed(name):
                found[f"{name}_max"] = self.largest.get(name)
        return found


class Recorder:
    """Writes the samples of one job."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._buckets = [_Bucket() for _ in TIERS[1:]]
        self._headers: dict[int, tuple[str, ...]] = {}
        self._begun: dict[int, float] = {}
        self.dropped = 0

    def add(self, time: float, values: Mapping[str, float | None]) -> None:
        """One look, at a unix time. A full disk drops it."""
        self._write(TIERS[0], time, values)
        for tier, bucket in zip(TIERS[1:], self._buckets, strict=True):
            start = time - time % tier.seconds
            if bucket.start != start:
                self._flush(tier, bucket)
                bucket.start = start
            bucket.add(values)

    def close(self) -> None:
        """Write what is under way: the job has ended."""
        for tier, bucket in zip(TIERS[1:], self._buckets, strict=True):
            self._flush(tier, bucket)

    def _flush(self, tier: Tier, bucket: _Bucket) -> None:
        if bucket.count:
            self._write(tier, bucket.start, bucket.row())
        bucket.start, bucket.count, bucket.total, bucket.largest = -1.0, {}, {}, {}

    def _write(self, tier: Tier, time: float, values: Mapping[str, float | None]) -> None:
        names = tuple(values)
        row = json.dumps([round(time, 1), *map(_short, values.values())], separators=(",", ":")).encode() + b"\n"
        if self._headers.get(tier.seconds) != names:
            row = json.dumps({"names": names}).encode() + b"\n" + row
        try:
            self._append(tier, time, row, names)
            self._headers[tier.seconds] = names
        except OSError as error:
            if not self.dropped:
                logger.warning("samples are dropped: %s", error)
            self.dropped += 1
            self._headers.pop(tier.seconds, None)

    def _append(self, tier: Tier, time: float, row: bytes, names: tuple[str, ...]) -> None:
        old, file = tier.parts(self._directory)
        if tier.seconds not in self._begun:
            self._directory.mkdir(exist_ok=True)
            first = _first_time(file)
            self._begun[tier.seconds] = time if first is None else first
        with _opened(file) as descriptor:
            size = os.fstat(descriptor).st_size
            full = size + len(row) > tier.part_bytes or time - self._begun[tier.seconds] >= tier.span_s
            if not size or not full:
                _add(descriptor, size, row)
                return
        file.replace(old)
        self._begun[tier.seconds] = time
        header = b"" if row.startswith(b"{") else json.dumps({"names": names}).encode() + b"\n"
        with _opened(file) as descriptor:
            _add(descriptor, 0, header + row)


@contextmanager
def _opened(file: Path) -> Iterator[int]:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _add(descriptor: int, size: int, row: bytes) -> None:
    """Append to a file of so many bytes, all of it or nothing."""
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        row = b"\n" + row  # a killed daemon left a line unfinished
    if os.write(descriptor, row) < len(row):
        os.ftruncate(descriptor, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _short(value: float | None) -> float | int | None:
    """Six digits are more than any sensor has; bytes stay whole."""
    if value is None or not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() else float(f"{value:.6g}")


def _first_time(file: Path) -> float | None:
    for time, _ in _rows(file):
        return time
    return None


def _rows(file: Path) -> Iterator[tuple[float, dict[str, float | None]]]:
    """Rows of a part in their order; what is no row is passed over."""
    names: Sequence[str] = ()
    try:
        with file.open("rb") as lines:
            for line in lines:
                try:
                    found = json.loads(line)
                except ValueError:
                    continue
                if isinstance(found, dict):
                    names = found.get("names", ())
                elif isinstance(found, list) and found and len(found) == len(names) + 1:
                    yield float(found[0]), dict(zip(names, found[1:], strict=True))
    except FileNotFoundError:
        return


@dataclass
class Series:
    """Times (unix, seconds) and values of one name, oldest first."""

    times: "array[float]" = field(default_factory=lambda: array("d"))
    values: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, time: float, value: float | None) -> None:
        """One point more; null is none."""
        if value is not None:
            self.times.append(time)
            self.values.append(value)


def read_series(directory: Path, since: float) -> dict[str, Series]:
    """All series of a job behind a time; each time from the finest file that has it."""
    found: dict[str, Series] = {}
    starts = [_begin_of(tier, directory) for tier in TIERS]
    for place in reversed(range(len(TIERS))):
        finer = min(starts[:place], default=math.inf)
        for part in TIERS[place].parts(directory):
            for time, values in _rows(part):
                if since < time < finer:
                    for name, value in values.items():
                        found.setdefault(name, Series()).add(time, value)
                        if not place and _is_maxed(name):
                            found.setdefault(f"{name}_max", Series()).add(time, value)
    return found


def _begin_of(tier: Tier, directory: Path) -> float:
    times = (_first_time(part) for part in tier.parts(directory))
    return next((time for time in times if time is not None), math.inf)


def thin(series: Series, max_points: int) -> list[tuple[float, float]]:
    """At most `max_points` of a series: of each span of time the smallest and the largest value, as they came; and the
    first and the last, where there is room for four.
    """
    count = len(series.times)
    if count <= max_points:
        return list(zip(series.times, series.values, strict=True))
    kept = {0, count - 1} if max_points >= 4 else set()
    spans = max(1, (max_points - len(kept)) // 2)
    for span in range(spans):
        places = range(span * count // spans, (span + 1) * count // spans)
        kept |= {min(places, key=series.values.__getitem__), max(places, key=series.values.__getitem__)}
    return [(series.times[place], series.values[place]) for place in sorted(kept)]
