"""Stacks of a running job, taken by its shim when asked."""

import secrets
import threading
from pathlib import Path

from server.domain.states import LIVE_JOB
from server.errors import Conflict, Unavailable
from server.services.jobs import load_job
from server.services.orders import order_once
from server.services.runtime import Runtime
from server.system import clock
from server.system.beneath import open_beneath
from server.system.process import read_process

ANSWER_S = 5.0
MAX_TEXT = 4 << 20
LOOK_S = 0.03


def take_stack(runtime: Runtime, job_id: str) -> bytes:
    """The stacks of every thread of a job's processes, as of now.

    Raises:
        NotFound: there is none of that id.
        Conflict: it does not run, or its shim is dead.
        Unavailable: the shim has not answered in time.
    """
    job = load_job(runtime, job_id)
    if job.state not in LIVE_JOB or job.attempt is None:
        raise Conflict(f"job {job_id} is {job.state}: there is no process to look at")
    directory = runtime.job_dir(job_id)
    attempt = directory.attempt(job.attempt.number)
    process = read_process(attempt.process)
    if process is None or process.stage is None:
        raise Conflict(f"the stage of job {job_id} has not begun yet")
    if not process.shim_lives:
        raise Conflict(f"the shim of job {job_id} is dead: nobody can ask the stage")
    with runtime.stack_lock:
        before = _size(attempt.stacks)
        try:
            order_once(directory.stack, secrets.token_hex(8))
        except OSError as error:
            raise Unavailable(f"the request cannot be written: {error}") from error
        return _answer(runtime.settings.jobs_dir, attempt.stacks, before)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _answer(root: Path, path: Path, offset: int) -> bytes:
    end = clock.boottime() + ANSWER_S
    pause = threading.Event()
    while clock.boottime() < end:
        if _size(path) > offset:
            try:
                with open_beneath(root, path) as file:
                    file.seek(offset)
                    text = file.read(MAX_TEXT)
            except OSError as error:
                raise Conflict(f"{path.name} is not a file of its own any more: {error.strerror}") from error
            if b"\n== end " in text:
                return text
        pause.wait(LOOK_S)
    raise Unavailable(f"the shim has not answered within {ANSWER_S:g} s")
