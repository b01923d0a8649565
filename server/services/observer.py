"""Looking at a job's directory and processes. Nothing is changed here.

The order of looking is what makes a verdict safe: the lock first, the exit record behind it, events last. A shim
writes exit.json before it lets go of the lock, and a stage its events before the shim can write exit.json; so a free
lock without exit.json means there will never be one, and events read after an exit are all there are.
"""

import os
import re
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from eagle3_core.contract.exits import ExitCode
from eagle3_core.contract.jobdir import AttemptDir, JobDir, complete_lines, read_json
from eagle3_core.contract.locks import is_held
from eagle3_core.contract.signatures import END_BYTES
from server.domain.advance import Observation
from server.domain.job import Attempt
from server.domain.outcome import End, ExitRecord
from server.services.orders import policy_stop
from server.system import clock
from server.system.beneath import open_beneath
from server.system.process import Child, ProcessRecord, read_process

LINES_A_LOOK = 4 << 20
LAST_WORDS = 300


class NeverBegan(Exception):
    """The attempt has a row, but no process of it ever ran: it may be spawned without being started twice."""


def observe(job: JobDir, attempt: Attempt, child: Child | None) -> tuple[Observation, ProcessRecord | None]:
    """One look at a live attempt.

    Args:
        job: its directory.
        attempt: what is stored of it.
        child: the shim, when this very daemon started it.

    Raises:
        NeverBegan: the lock is free, no shim wrote process.json, and none is on its way.
    """
    files = job.attempt(attempt.number)
    exit_code = None if child is None else child.exit_code()
    on_its_way = child is not None and exit_code is None
    alive = is_held(files.lock) or on_its_way
    record = read_exit(files.exit)
    process = read_process(files.process)
    end = None if alive and record is None else _end(files, attempt, record, process, exit_code)
    lines, more = new_lines(files.events, attempt.event_offset)
    seen = Observation(
        now=clock.utc_now(),
        boottime_s=clock.boottime(),
        lines=lines,
        more=more,
        started_boottime_s=_started(process, alive),
        supervised=process is None or process.shim_lives,
        stop_ordered=job.cancel.exists(),
        pause_ordered=job.pause.exists(),
        policy_stop=policy_stop(job),
        end=end,
    )
    return seen, process


def _started(process: ProcessRecord | None, alive: bool) -> float | None:
    """When it began: once the stage is named, or its shim died before it could name it and the stage holds the lock.

    A shim that is gone without a stage could not start one: that attempt never ran.
    """
    if process is None or (process.stage is None and (process.shim_lives or not alive)):
        return None
    return process.started_boottime_s


def _end(
    files: AttemptDir,
    attempt: Attempt,
    record: ExitRecord | None,
    process: ProcessRecord | None,
    exit_code: int | None,
) -> End:
    """Evidence of an end: the shim's record, or that nobody is left who could write one."""
    words = last_words(files.log)
    if record is not None and record.error is not None and attempt.started_at is not None:
        record = None  # "could not be started" of a stage that was seen to run: damaged
    began = attempt.started_at is not None or process is not None or files.exit.exists()
    if record is None and not began:
        if exit_code in (None, ExitCode.DISK_FULL):  # the shim found no room for its first file
            raise NeverBegan
        record = ExitRecord(error=words or f"the shim exited with {exit_code}")
    return End(
        record,
        any_event=files.events.exists() and files.events.stat().st_size > 0,
        rebooted=process is not None and process.rebooted,
        other_host=None if process is None or process.here else process.host,
        last_words=words,
        log_end=log_end(files.log),
    )


def read_exit(path: Path) -> ExitRecord | None:
    """exit.json, or None while there is none, and for a damaged one, which says nothing."""
    try:
        found = read_json(path)
        record = None if found is None else ExitRecord.model_validate(found)
    except (ValueError, ValidationError, RecursionError):
        return None
    return None if record is None or record.says_nothing else record


def last_words(log: Path) -> str | None:
    """The last line of a log that says anything, without control characters."""
    try:
        with _open(log) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 8192))
            tail = file.read().decode(errors="replace")
    except OSError:  # not there, or no file of its own
        return None
    lines = [
        " ".join(re.sub(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x1f\x7f]", " ", line).split()) for line in tail.splitlines()
    ]
    spoken = [line for line in lines if line]
    return spoken[-1][:LAST_WORDS] if spoken else None


def log_end(log: Path) -> bytes:
    """The end of a log, as much as is worth reading for a cause."""
    try:
        with _open(log) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - END_BYTES))
            return file.read(END_BYTES)
    except OSError:
        return b""


def _open(log: Path) -> BinaryIO:
    """A log, as long as it is one: a link in its place could lead to anything, and its last line is shown."""
    return open_beneath(log.parents[3], log)


def new_lines(path: Path, offset: int) -> tuple[list[tuple[int, bytes]], bool]:
    """(offset behind it, text) of each new line, and whether the look ended before the file did."""
    try:
        if path.stat().st_size <= offset:
            return [], False
    except FileNotFoundError:
        return [], False
    found: list[tuple[int, bytes]] = []
    start = offset
    while lines := complete_lines(path, offset):
        found += lines
        offset = lines[-1][0]
        if offset - start >= LINES_A_LOOK:
            return found, True
    return found, False
