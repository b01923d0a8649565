"""The job directory: file names, whole files, and lines that are only ever appended. Standard library only.

    <state>/jobs/<id>/
      record.json          server   what the database also holds and the job cannot do without
      spec.json            server   the complete parameters; never rewritten
      control/             server   one small file per command: cancel, pause, stop, checkpoint, stack
      attempts/<n>/        one process life
        lock               flock taken by the server before it spawns, held on by shim and stage
        resources.json     server   the GPUs it was given, before it spawns
        process.json       shim     who shim and stage are
        output.log         stage    its stdout and stderr
        events.jsonl       stage    one JSON object a line
        exit.json          shim     how it ended
        stacks.txt         both     where its processes stood when that was asked for, or it stalled
      metrics/             server   samples of its GPUs and of the host
      artifacts/           outputs, unless the job has an `output_dir` of its own

One writer per file. Whole files appear by temp + fsync + rename; only output.log and events.jsonl grow.
"""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

JOB_ID_VARIABLE = "EYAS_JOB_ID"
"""Set in the environment of every process of a job, so that left-behind ones can be found."""

LOCK_FD_VARIABLE = "EYAS_LOCK_FD"
"""Tells shim and stage the number of the inherited descriptor that holds the attempt's lock."""

OUTPUT_DIR_VARIABLE = "EYAS_OUTPUT_DIR"
"""Tells the program of an `external` stage where its outputs belong."""

MAX_SECONDS_VARIABLE = "EYAS_MAX_SECONDS"
"""Tells the shim how many seconds the attempt may take."""

MARKER_NAME = ".eyas-job"
"""File in an output directory that says which job it belongs to."""

EVENTS_NAME = "events.jsonl"

MAX_LINE_BYTES = 16 << 20
"""More than any event has; a longer line is damage."""


@dataclass(frozen=True)
class AttemptDir:
    """Paths of one process life."""

    path: Path

    @property
    def number(self) -> int:
        """1 for the first attempt."""
        return int(self.path.name)

    @property
    def lock(self) -> Path:
        """Held while shim or stage lives."""
        return self.path / "lock"

    @property
    def resources(self) -> Path:
        """{"gpus": [{"index", "uuid", "name"}]}: what it holds, written before it is started."""
        return self.path / "resources.json"

    @property
    def process(self) -> Path:
        """Written by the shim once the stage is started."""
        return self.path / "process.json"

    @property
    def log(self) -> Path:
        """Everything the stage printed."""
        return self.path / "output.log"

    @property
    def events(self) -> Path:
        """What the stage reported."""
        return self.path / EVENTS_NAME

    @property
    def stacks(self) -> Path:
        """Where its processes stood when somebody asked, or when it stalled; written by shim and stage."""
        return self.path / "stacks.txt"

    @property
    def exit(self) -> Path:
        """Written by the shim when the stage has ended."""
        return self.path / "exit.json"


@dataclass(frozen=True)
class JobDir:
    """Paths of one job."""

    path: Path

    @property
    def record(self) -> Path:
        """The server's own account of the job."""
        return self.path / "record.json"

    @property
    def spec(self) -> Path:
        """The complete parameters."""
        return self.path / "spec.json"

    @property
    def control(self) -> Path:
        """Commands to a running attempt."""
        return self.path / "control"

    @property
    def cancel(self) -> Path:
        """Its presence asks the shim to stop the stage: {"grace_s": seconds, "checkpoint": save first}."""
        return self.control / "cancel.json"

    @property
    def pause(self) -> Path:
        """Asks the shim to stop the stage, which saves first: {"grace_s": seconds}."""
        return self.control / "pause.json"

    @property
    def stop(self) -> Path:
        """Asks for a stop by policy: {"grace_s": seconds, "reason": word}."""
        return self.control / "stop.json"

    @property
    def checkpoint(self) -> Path:
        """Asks a training for a checkpoint now: {"id": text}, once for each id."""
        return self.control / "checkpoint.json"

    @property
    def stack(self) -> Path:
        """Asks the shim for the stacks of the stage: {"id": text}, once for each id."""
        return self.control / "stack.json"

    @property
    def metrics(self) -> Path:
        """Samples taken while it ran."""
        return self.path / "metrics"

    @property
    def artifacts(self) -> Path:
        """Where outputs go when the parameters name no output directory."""
        return self.path / "artifacts"

    @property
    def attempts(self) -> Path:
        """Holds one directory for each process life."""
        return self.path / "attempts"

    def attempt(self, number: int) -> AttemptDir:
        """Paths of the given process life."""
        return AttemptDir(self.attempts / str(number))

    def attempt_numbers(self) -> list[int]:
        """The process lives there are directories of, in order."""
        try:
            return sorted(int(path.name) for path in self.attempts.iterdir() if path.name.isdecimal())
        except FileNotFoundError:
            return []


def is_full(error: OSError) -> bool:
    """Whether this is for want of space: the disk is full, or the user's quota."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def whole_file(path: Path, mode: int = 0o644) -> Iterator[BinaryIO]:
    """A file to write that appears complete or not at all, and durably, when the block ends.

    Raises:
        OSError: the disk is full or the like; names the file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        _name_file(error, path)
        raise
    fsync_directory(path.parent)


def append_line(path: Path, line: str) -> None:
    """Add a line to a file that only grows.

    Raises:
        OSError: the disk is full or the like; names the file.
    """
    try:
        with path.open("ab") as file:
            file.write(line.encode() + b"\n")
    except OSError as error:
        _name_file(error, path)
        raise


def _name_file(error: BaseException, path: Path) -> None:
    """Raise an error of the system that names no file once more, with its name."""
    if isinstance(error, OSError) and error.filename is None:
        raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error


def write_whole(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Make a file appear complete or not at all, and durably.

    Raises:
        OSError: the disk is full or the like; names the file.
    """
    with whole_file(path, mode) as file:
        file.write(data)


def write_json(path: Path, value: Any, mode: int = 0o644) -> None:
    """`write_whole` of indented JSON; NaN and infinities are refused."""
    write_whole(path, json.dumps(value, indent=1, allow_nan=False).encode() + b"\n", mode)


def read_json(path: Path) -> Any | None:
    """The value of a whole JSON file, or None while there is none."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None


def fsync_directory(path: Path) -> None:
    """Make renames and new names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def complete_lines(path: Path, offset: int, limit: int = 1 << 20) -> list[tuple[int, bytes]]:
    """Complete lines of a growing file from a byte offset, at most about `limit` bytes of them.

    Returns:
        (offset behind the line, line without its newline) of each; an unfinished last line is left for later.
        A single line longer than `limit` is read whole, and one longer than MAX_LINE_BYTES comes in pieces, so that
        reading always gets on and never takes much memory.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            parts = [file.read(limit)]
            while b"\n" not in parts[-1] and len(parts) * limit < MAX_LINE_BYTES and (more := file.read(limit)):
                parts.append(more)
    except FileNotFoundError:
        return []
    data = b"".join(parts)
    if len(data) >= MAX_LINE_BYTES and b"\n" not in data:
        return [(offset + len(data), data)]
    lines = []
    end = offset
    for line in data.split(b"\n")[:-1]:
        end += len(line) + 1
        lines.append((end, line))
    return lines
