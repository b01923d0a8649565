"""external: a program of the operator's choice, run as it is and never through a shell.

It is a child of the stage with the stage's own stdout and stderr, so that a dead stage breaks nothing; the stage reads
along in the log's file. SIGTERM is passed on to it. Its end is told apart: by a signal, then the stage ends by the same
one, so that the shim's record says so; by a code of its own, then that code is the cause, whatever number it is.
"""

import contextlib
import faulthandler
import os
import resource
import select
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from eagle3_core.contract.exits import DEFAULT_GRACE_S
from eagle3_core.contract.jobdir import OUTPUT_DIR_VARIABLE
from eagle3_core.contract.params import ExternalParams
from eagle3_core.errors import BadData, BadInput, Diverged, InvalidCheckpoint, ProgramFailed
from worker.context import StageContext, StageResult, Stopped
from worker.follow import LogFollower
from worker.watcher import Watcher

TURN_S = 0.2

SHELL_SIGNAL_BASE = 128
"""A shell reports a command that was killed by signal N as exit code 128 + N."""


def run(context: StageContext) -> StageResult:
    """Run the program to its end.

    Raises:
        BadInput: it cannot be started.
        ProgramFailed: it exited with another code than 0.
        BadData: it exited 0, but an output it was to write is missing.
        InvalidCheckpoint, Diverged: that was seen, and the job was asked to stop then.
        Stopped: it ended after it was asked to stop.
    """
    params = context.params
    assert isinstance(params, ExternalParams)
    context.check_stop()
    context.phase("running")
    watcher = _watcher(context, params)
    program = _start(params, context.output_dir)
    try:
        code, told = _wait(program, context.stop_requested, watcher.turn)
    except (InvalidCheckpoint, Diverged):
        watcher.close()
        _end(context, program)
        raise
    if told:
        context.report("program", f"{_manner(code)} after it was asked to stop", exit_code=code)
        watcher.finish(succeeded=False)
        raise Stopped
    watcher.finish(succeeded=code == 0)
    if code < 0:
        context.report("program", _manner(code), exit_code=code)
        _end_by(-code)
    if code > 0:
        raise _failure(params.argv[0], code)
    watcher.tell_what_was_missed(params.watch)
    return StageResult({"exit_code": 0}, _outputs(params, context.output_dir))


def _watcher(context: StageContext, params: ExternalParams) -> Watcher:
    """Reads the log from where the program will begin, and looks for checkpoints that are not there yet."""
    directory = context.output_dir if params.watch is None else context.output_dir / params.watch
    log = LogFollower(Path("/proc/self/fd/1"), os.fstat(1).st_size)
    watcher = Watcher(context, params, log, directory, present=False)
    watcher.stop_on(invalid=params.on_invalid_checkpoint == "stop", nonfinite=params.on_nonfinite_loss == "stop")
    return watcher


def _start(params: ExternalParams, output_dir: Path) -> subprocess.Popen[bytes]:
    place = output_dir if params.working_dir is None else Path(params.working_dir)
    if not place.is_dir():
        raise BadInput(f"working_dir {place} is not a directory")
    try:
        return subprocess.Popen(
            params.argv,
            stdin=subprocess.DEVNULL,
            cwd=place,
            env={**os.environ, OUTPUT_DIR_VARIABLE: str(output_dir)},
            process_group=0,  # `kill 0` in the program must not reach the stage
        )
    except OSError as error:
        raise BadInput(f"{params.argv[0]} cannot be started: {error.strerror}") from error


def _wait(
    program: subprocess.Popen[bytes], stop_requested: threading.Event, turn: Callable[[], None]
) -> tuple[int, bool]:
    """Its code (negative: the signal), and whether it lived when a stop was passed on to it. `turn` is called often."""
    descriptor = os.pidfd_open(program.pid)  # stays open: the thread may need it as long as this process lives
    told = threading.Event()
    telling = threading.Lock()

    def pass_on() -> None:
        stop_requested.wait()
        with telling, contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
            told.set()

    threading.Thread(target=pass_on, name="pass the stop on", daemon=True).start()
    # In turns: a signal that comes just before a wait without end would be heeded only after it.
    while not select.select([descriptor], [], [], TURN_S)[0]:
        turn()
    code = program.wait()
    with telling:
        return code, told.is_set()


def _end(context: StageContext, program: subprocess.Popen[bytes]) -> None:
    """Ask a program to stop on the job's own account, and kill it when its grace is over."""
    with contextlib.suppress(ProcessLookupError):
        program.terminate()
    try:
        code = program.wait(DEFAULT_GRACE_S)
    except subprocess.TimeoutExpired:
        program.kill()
        code = program.wait()
    context.report("program", f"{_manner(code)} after it was asked to stop", exit_code=code)


def _manner(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _failure(program: str, code: int) -> ProgramFailed:
    failure = ProgramFailed(f"{program} exited with code {code} of its own accord")
    failure.hint = "what it printed is in the log"
    number = code - SHELL_SIGNAL_BASE
    if 0 < number < signal.NSIG:
        word = _manner(-number).removeprefix("was ")
        failure.hint += f"; a wrapper reports a command that was {word} with this code"
        if number == signal.SIGKILL:
            failure.hint += ", possibly for want of memory: see dmesg"
    return failure


def _end_by(number: int) -> NoReturn:
    """End this process by a signal, as the program ended, without a second core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    raise AssertionError(f"signal {number} does not end a process")


def _outputs(params: ExternalParams, output_dir: Path) -> dict[str, str]:
    missing = [name for name in params.expect_outputs if not (output_dir / name).exists()]
    if missing:
        raise BadData(f"{params.argv[0]} exited with code 0, but did not write {', '.join(missing)} in {output_dir}")
    return {"output": str(output_dir), **{name: str(output_dir / name) for name in params.expect_outputs}}
