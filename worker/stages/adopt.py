"""adopt: a process somebody else started, watched to its end. It is never signalled, and stays theirs.

Nobody but its parent can learn its exit code. What it came to is told from evidence:

    the log ends with a failure we know, or with a traceback      failed, for that reason
    the log shows steps, and they stop clearly before their end   failed
    neither                                                       succeeded, with the warning exit_code_unknown
"""

import os
import re
from pathlib import Path

from eagle3_core.contract.identity import ProcessIdentity, is_alive
from eagle3_core.contract.params import AdoptParams
from eagle3_core.contract.signatures import END_BYTES, find_signature
from eagle3_core.errors import BadInput, ProgramFailed
from worker.context import StageContext, StageResult
from worker.follow import LineSplitter, LogFollower
from worker.watcher import Watcher

TURN_S = 0.5
LAST_LINES = 20

_TRACEBACK = re.compile(r"^(?:\[rank\d+\]: ?)?Traceback \(most recent call last\):")
_EXCEPTION = re.compile(r"^(?:\[rank\d+\]: ?)?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning)\b.{0,300})")
_HINT = "what the process exited with cannot be known: only its parent was told"


def run(context: StageContext) -> StageResult:
    """Follow the process to its end.

    Raises:
        ProgramFailed: its log says or shows that it failed.
        Stopped: the watching was to end; the process goes on.
    """
    params = context.params
    assert isinstance(params, AdoptParams)
    if params.log is None or params.start_ticks is None or params.boot_id is None:
        raise BadInput("log, start_ticks and boot_id are filled in by the daemon when the job is submitted")
    log = Path(params.log).resolve()
    if log.exists() and not log.is_file():
        raise BadInput(f"log {log} is no regular file; name the file the process writes to")
    identity = ProcessIdentity(params.pid, params.start_ticks, params.boot_id)
    where = "nowhere for checkpoints" if params.watch is None else f"{params.watch} for checkpoints"
    context.report("process", f"{params.pid}; its log is {log}; watched: {where}", pid=params.pid, log=str(log))
    context.phase("running")
    directory = None if params.watch is None else Path(params.watch)
    watcher = Watcher(context, params, LogFollower(log, by_name=True), directory, present=True)
    while is_alive(identity):
        watcher.turn()
        if context.stop_requested.wait(TURN_S):
            watcher.close()
            context.check_stop()
    watcher.finish(succeeded=False)
    context.check_stop()
    return _outcome(context, watcher, log, params.watch)


def _outcome(context: StageContext, watcher: Watcher, log: Path, watch: str | None) -> StageResult:
    """What the end of the log, and how far the work had come, tell of the end."""
    end = _end_of(log)
    lines = _lines(end)
    print("\n".join(["the log of the process ends:", *lines[-LAST_LINES:]]), flush=True)
    signature = find_signature(end)
    cause = signature.line if signature is not None else _exception(lines)
    if cause is None and (place := watcher.progress.unfinished()) is not None:
        cause = f"the process ended at {place}"
    if cause is not None:
        print(cause, flush=True)  # last: from here the daemon takes the reason
        failure = ProgramFailed(cause)
        failure.hint = _HINT
        raise failure
    text = (
        "the process has ended; its log shows no failure, but its exit code cannot be known: only its parent was told"
    )
    context.warn("exit_code_unknown", text)
    watcher.tell_what_was_missed(watch)
    return StageResult({"exit_code": None, "finished": watcher.progress.finished})


def _end_of(log: Path) -> bytes:
    try:
        with os.fdopen(os.open(log, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - END_BYTES))
            return file.read(END_BYTES)
    except OSError:
        return b""


def _lines(end: bytes) -> list[str]:
    splitter = LineSplitter()
    return [*splitter.feed(end), *splitter.flush()]


def _exception(lines: list[str]) -> str | None:
    """The exception a log ends with, where a traceback stands before it."""
    if not any(_TRACEBACK.match(line) for line in lines):
        return None
    found = [match for line in lines[-3:] if (match := _EXCEPTION.match(line)) is not None]
    return found[-1][1] if found else None
