"""The stage harness: what surrounds `run(context)` of every stage, from spec.json to the exit code.

spec.json -> params, output directory, events -> stage -> `result` and exit 0
                                                       -> `error` with cause and hint, and the code of its kind
                                                       -> asked to stop: exit STOPPED
"""

import contextlib
import faulthandler
import importlib
import os
import re
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from pydantic import ValidationError

from eagle3_core.contract.access import unusable
from eagle3_core.contract.events import EventWriter
from eagle3_core.contract.exits import ExitCode
from eagle3_core.contract.jobdir import LOCK_FD_VARIABLE, MARKER_NAME, AttemptDir, JobDir, is_full, write_whole
from eagle3_core.contract.spec import JobSpec
from eagle3_core.errors import BadInput, Eagle3Error
from worker.context import StageContext, StageResult, Stopped
from worker.output import outlast_a_full_disk

HEARTBEAT_S = 5.0

RESULT_WAIT_S = 600.0
"""How long a finished stage waits for room to say so."""

STOPPED_WAIT_S = 5.0
"""The same for one that was asked to stop; it may be killed meanwhile."""

_LEFT_BY_WRITE_WHOLE = re.compile(r"^\..+\.\d+\.tmp$")

STAGE_MODULES: dict[str, str] = {
    "prepare": "worker.stages.prepare",
    "extract": "worker.stages.extract",
    "train": "worker.stages.train",
    "validate": "worker.stages.validate",
    "convert": "worker.stages.convert",
    "evaluate": "worker.stages.evaluate",
    "external": "worker.stages.external",
    "adopt": "worker.stages.adopt",
}
"""Where each kind of work is; only the wanted one is imported."""


def main(arguments: list[str]) -> int:
    """Do the work of one attempt; returns the exit code."""
    faulthandler.enable()
    keep_lock_to_this_process()
    outlast_a_full_disk()
    attempt = AttemptDir(Path(arguments[0]))
    stop_requested = threading.Event()
    answer_with_stacks(attempt)
    listen_for_stop(stop_requested)
    earlier = [attempt.path.with_name(str(number)) / "events.jsonl" for number in range(1, attempt.number)]
    try:
        events = EventWriter(attempt.events, earlier)
    except OSError as error:
        if is_full(error):  # the exit code alone must do
            return ExitCode.DISK_FULL
        raise
    start_heartbeat(events)
    try:
        result = work(JobDir(attempt.path.parent.parent), events, stop_requested)
        events.write("result", data=result.data, artifacts=result.artifacts)
        wait_for_room(events, stop_requested, RESULT_WAIT_S)
    except Stopped:
        with contextlib.suppress(OSError):
            wait_for_room(events, threading.Event(), STOPPED_WAIT_S)
        print("== stopped as asked", flush=True)
        return ExitCode.STOPPED
    except Exception as error:  # noqa: BLE001 - around a stage: whatever it raises becomes a reason
        return tell_failure(error, events)
    return ExitCode.DONE


def wait_for_room(events: EventWriter, stop_requested: threading.Event, patience_s: float) -> None:
    """Have every event on disk; a disk that is full is given time, until a stop is asked for.

    Raises:
        OSError: it is still full; names the file.
    """
    end = time.monotonic() + patience_s
    while True:
        try:
            return events.flush()
        except OSError as error:
            if not is_full(error) or time.monotonic() > end or stop_requested.wait(0.5):
                raise


def work(job: JobDir, events: EventWriter, stop_requested: threading.Event) -> StageResult:
    """Read the order, make its place, and let the stage do it."""
    spec = JobSpec.read(job.spec)
    place = spec.params.paths().get("output_dir")
    output_dir = claim(job.artifacts if place is None else Path(place[1]), spec.job_id)
    if spec.stage != "external":  # whose files are the program's own
        clear_half_written(output_dir)
    context = StageContext(spec.job_id, spec.params, output_dir, events, job.control, stop_requested)
    context.phase("importing")
    module = importlib.import_module(STAGE_MODULES[spec.stage])
    result: StageResult = module.run(context)
    return result


def claim(directory: Path, job_id: str) -> Path:
    """Make an output directory this job's own.

    Raises:
        BadInput: it holds files and is not marked with this job's id, is no directory, or cannot be written.
    """
    if fault := unusable(directory, os.W_OK):
        raise BadInput(f"output_dir {fault}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise BadInput(f"output_dir {directory} is not a directory") from None
    marker = directory / MARKER_NAME
    owner = marker.read_text().strip() if marker.is_file() else None
    if owner == job_id:
        return directory
    if owner is not None or not all(_LEFT_BY_WRITE_WHOLE.match(path.name) for path in directory.iterdir()):
        whose = "files that belong to no job" if owner is None else f"the output of job {owner}"
        raise BadInput(f"output_dir {directory} is occupied: it holds {whose}; empty it or name another")
    write_whole(marker, f"{job_id}\n".encode())  # an empty one, as a full disk leaves it, would be nobody's
    return directory


def clear_half_written(directory: Path) -> None:
    """Remove what an attempt that was killed in the middle of a write left in its output directory."""
    for path in directory.iterdir():
        if _LEFT_BY_WRITE_WHOLE.match(path.name) and path.is_file() and not path.is_symlink():
            path.unlink()


def tell_failure(error: Exception, events: EventWriter) -> ExitCode:
    """Print and report why the stage failed; returns its exit code."""
    code, cause, hint = explain(error)
    with contextlib.suppress(OSError):  # on a full disk the exit code alone must do
        events.write("error", exit_code=int(code), cause=cause, hint=hint)
        events.flush()
    with contextlib.suppress(OSError):
        if code in (ExitCode.INTERNAL_ERROR, ExitCode.IMPORT_ERROR) or isinstance(error, MemoryError):
            traceback.print_exception(error)
        print(f"error: {cause}" + (f"\nhint: {hint}" if hint else ""), flush=True)
    return code


def explain(error: BaseException) -> tuple[ExitCode, str, str | None]:
    """Exit code, one-line cause and hint of whatever a stage raised, or of what that was raised from."""
    code, hint = _kind(error)
    if code == ExitCode.INTERNAL_ERROR and error.__cause__ is not None:
        inner = explain(error.__cause__)
        if inner[0] != ExitCode.INTERNAL_ERROR:
            return inner
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        text = ": ".join(["spec.json", *(str(part) for part in first["loc"]), first["msg"]])
    if code == ExitCode.INTERNAL_ERROR:
        text = f"{type(error).__name__}: {text}"
    return code, text[:1000], hint


def _kind(error: BaseException) -> tuple[ExitCode, str | None]:
    """Exit code and hint by type. torch is asked only when the stage has loaded it."""
    torch = sys.modules.get("torch")
    code, hint = ExitCode.INTERNAL_ERROR, "the traceback is in the log"
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        code, hint = ExitCode.OUT_OF_GPU_MEMORY, "lower max_seq_len or batch_tokens, or free the GPU"
    elif isinstance(error, Eagle3Error):
        return error.exit_code, error.hint
    elif isinstance(error, ValidationError):
        code, hint = ExitCode.BAD_INPUT, "worker and daemon may differ in version"
    elif isinstance(error, MemoryError):
        code, hint = ExitCode.OUT_OF_HOST_MEMORY, "lower batch_tokens, max_seq_len or num_workers"
    elif isinstance(error, OSError) and is_full(error):
        code, hint = ExitCode.DISK_FULL, "free space on that file system, then submit again"
    elif isinstance(error, ImportError):
        code, hint = ExitCode.IMPORT_ERROR, f"install it into the environment of {sys.executable}"
    return code, hint


def keep_lock_to_this_process() -> None:
    """Children must not hold the attempt's lock: neither programs started nor forked helpers."""
    number = os.environ.pop(LOCK_FD_VARIABLE, None)
    if number is None:
        return
    held = [int(number)]
    os.set_inheritable(held[0], False)

    def close_once() -> None:
        while held:  # a child of the child must not close whatever has that number by then
            os.close(held.pop())

    os.register_at_fork(after_in_child=close_once)


def answer_with_stacks(attempt: AttemptDir) -> None:
    """SIGUSR1 appends the stacks of every thread to stacks.txt, whatever the threads are doing."""
    with contextlib.suppress(OSError):  # a full disk is met where it matters
        faulthandler.register(signal.SIGUSR1, file=attempt.stacks.open("a"), all_threads=True)


def listen_for_stop(stop_requested: threading.Event) -> None:
    """SIGTERM sets the event, by a thread that the signal itself wakes.

    A handler in Python runs when the main thread next runs Python, which may be never, and cannot take a lock it holds.
    """
    woken, wake = os.pipe()
    os.set_blocking(wake, False)

    def listen() -> None:
        while os.read(woken, 1)[0] != signal.SIGTERM:
            pass
        stop_requested.set()

    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a child's signals are none of ours
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    threading.Thread(target=listen, name="stop", daemon=True).start()


def start_heartbeat(events: EventWriter) -> None:
    """Tell every few seconds that the process lives, from a thread that the stage's work cannot hold up."""
    pause = threading.Event()

    def beat() -> None:
        while not pause.wait(HEARTBEAT_S):
            try:
                events.write("heartbeat")
            except OSError:
                continue  # a full disk; the stage itself will meet it

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


if __name__ == "__mp_main__":  # a data loader worker the stage spawned
    answer_with_stacks(AttemptDir(Path(sys.argv[1])))

if __name__ == "__main__":
    code = main(sys.argv[1:])
    # The code says how it ended. While Python takes itself apart a SIGTERM would end it by the signal instead, and a
    # stage that has done its work would look like one that was stopped.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(code)
