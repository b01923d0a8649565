"""events.jsonl: what a stage reports, one JSON object a line, in the order it happened.

Every event carries `seq` (1, 2, 3 ... over all attempts of the job), `time` (UTC), `boottime_s` (CLOCK_BOOTTIME,
for durations) and `type`. Numbers that are not finite are written as null. Progress travels here, never through stdout.
"""

import fcntl
import json
import math
import os
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from eagle3_core.contract.jobdir import complete_lines, is_full

HELD_BYTES = 8 << 20
"""Events kept in memory while the disk is full: hours of a training's."""

MAX_COUNT = 1 << 63
"""A database column holds less."""

Count = Annotated[int, Field(ge=0, lt=MAX_COUNT)]


class _Event(BaseModel):
    """What all events have. Fields of later versions are kept, not refused."""

    model_config = ConfigDict(frozen=True, extra="allow")

    seq: int = Field(ge=1, lt=MAX_COUNT)
    time: datetime
    boottime_s: float


class PhaseEvent(_Event):
    """The stage went on to another kind of work, such as `loading`, `training`, `validating`."""

    type: Literal["phase"]
    phase: str


class ReportEvent(_Event):
    """Facts found at the start: sizes, tensors read, parameters, samples, steps."""

    type: Literal["report"]
    title: str
    text: str
    data: dict[str, Any] = {}


class ProgressEvent(_Event):
    """How far the stage is: `step` of `steps`, and the rest, where the stage knows it."""

    type: Literal["progress"]
    step: int | None = None
    steps: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    loss: float | None = None
    accuracy: list[float | None] | None = None
    lr: float | None = None
    tokens_per_s: float | None = None
    eta_s: float | None = None
    unit: str | None = None


class MetricEvent(_Event):
    """Named values at a step, for series."""

    type: Literal["metric"]
    step: int
    values: dict[str, float | None]


class EpochEvent(_Event):
    """A finished epoch: seconds and metrics of both halves. Epochs count from 0, as checkpoint directories do."""

    type: Literal["epoch"]
    epoch: int
    epochs: int
    train_s: float
    val_s: float
    train: dict[str, Any]
    val: dict[str, Any] | None


class CheckpointEvent(_Event):
    """A checkpoint directory is complete on disk. A foreign one may not tell its epoch and step."""

    type: Literal["checkpoint"]
    path: str
    epoch: Count | None = None
    step: Count | None = None
    bytes: Count


class VerdictEvent(_Event):
    """The judge's word on a checkpoint; `servers` says what each server would do with it."""

    type: Literal["verdict"]
    path: str
    verdict: Literal["valid", "suspect", "invalid", "unreadable"]
    findings: list[dict[str, Any]]
    seconds: float
    level: Literal["quick", "full", "deep"] = "full"
    servers: list[dict[str, Any]] = []


class CheckpointRemovedEvent(_Event):
    """A checkpoint was removed on purpose, as `why` says; it is gone from its path."""

    type: Literal["checkpoint_removed"]
    path: str
    why: str


class WarningEvent(_Event):
    """Something the user should know that does not stop the job."""

    type: Literal["warning"]
    code: str
    message: str


class HeartbeatEvent(_Event):
    """The process lives; sent by a thread of its own."""

    type: Literal["heartbeat"]


class ErrorEvent(_Event):
    """Why the stage is about to exit with another code than 0."""

    type: Literal["error"]
    exit_code: int
    cause: str
    hint: str | None = None


class ResultEvent(_Event):
    """The stage has done its work; the last event before exit code 0."""

    type: Literal["result"]
    data: dict[str, Any]
    artifacts: dict[str, str]


Event = Annotated[
    PhaseEvent
    | ReportEvent
    | ProgressEvent
    | MetricEvent
    | EpochEvent
    | CheckpointEvent
    | VerdictEvent
    | CheckpointRemovedEvent
    | WarningEvent
    | HeartbeatEvent
    | ErrorEvent
    | ResultEvent,
    Field(discriminator="type"),
]

_ADAPTER: TypeAdapter[Event] = TypeAdapter(Event)


def parse_event(line: bytes) -> Event:
    """One line as an event.

    Raises:
        pydantic.ValidationError: the line is not JSON, of an unknown type, or lacks a field.
    """
    return _ADAPTER.validate_json(line)


class EventWriter:
    """The one writer of an attempt's events.jsonl.

    It takes a lock on the file, ends a line that a crash left unfinished, and goes on counting from the last
    sequence number of the job. Safe to call from several threads. While the disk is full events are held in memory, and
    written in their order as soon as there is room: a job whose own output has room goes on.
    """

    def __init__(self, path: Path, earlier: list[Path] | None = None) -> None:
        """Open for appending.

        Args:
            path: the attempt's file; made when absent.
            earlier: event files of the job's earlier attempts, so that `seq` never repeats.

        Raises:
            BlockingIOError: another process writes this file.
        """
        self._lock = threading.Lock()
        self._path = path
        self._held: list[bytes] = []
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")
        self._seq = max((_last_seq(file) for file in [*(earlier or []), path]), default=0)

    def write(self, kind: str, **fields: Any) -> int:
        """Append one event with a single write; returns its `seq`. Non-finite numbers become null.

        Raises:
            OSError: it cannot be written, and too much is held already; names the file.
        """
        with self._lock:
            event = {
                "seq": self._seq + 1,
                "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
                "boottime_s": round(time.clock_gettime(time.CLOCK_BOOTTIME), 3),
                "type": kind,
                **_finite(fields),
            }
            line = json.dumps(event, allow_nan=False).encode() + b"\n"
            _ADAPTER.validate_json(line)
            self._held.append(line)
            try:
                self._write_held()
            except OSError as error:
                if not is_full(error) or sum(map(len, self._held)) > HELD_BYTES:
                    self._held.pop()
                    raise
            self._seq += 1
            return self._seq

    def flush(self) -> None:
        """Write what is held.

        Raises:
            OSError: the disk is still full; names the file.
        """
        with self._lock:
            self._write_held()

    def _write_held(self) -> None:
        while self._held:
            line = self._held[0]
            size = os.fstat(self._fd).st_size
            try:
                written = os.write(self._fd, line)
                while written < len(line):
                    written += os.write(self._fd, line[written:])
            except OSError as error:
                os.ftruncate(self._fd, size)  # a full disk takes part of a line; the next one must not join it
                raise OSError(error.errno, os.strerror(error.errno or 0), str(self._path)) from error
            del self._held[0]

    def close(self) -> None:
        """Give the file and its lock back, everything on disk."""
        os.fsync(self._fd)
        os.close(self._fd)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _last_seq(path: Path) -> int:
    """The highest sequence number in a file; broken lines are passed over."""
    last = offset = 0
    while lines := complete_lines(path, offset):
        for end, line in lines:
            offset = end
            try:
                last = max(last, int(json.loads(line)["seq"]))
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                continue
    return last
