"""What a request to watch a process leaves open: who the process is now, and where its output goes."""

import os
from pathlib import Path

from eagle3_core.contract.params import AdoptParams, StageParams
from server.errors import FieldError, Invalid
from server.system.foreign import ForeignProcess, look_at


def complete(params: StageParams, pointer: str) -> StageParams:
    """The parameters of an `adopt` job with the identity of its process and its log; others as they are.

    Raises:
        Invalid: there is no such process, it is one of ours, or its output goes to no file.
    """
    if not isinstance(params, AdoptParams):
        return params
    process = look_at(params.pid)
    if process is None:
        raise _fault(pointer, "pid", f"there is no process {params.pid} that can be seen from here")
    if fault := _not_foreign(params.pid, process) or _another_by_now(params, process):
        raise _fault(pointer, "pid", fault)
    log = params.log
    if log is None:
        log = process.stdout
        if log is None or not log.startswith("/") or not Path(log).is_file():
            what = "cannot be seen from here" if log is None else f"goes to {log}, which is no file that can be read"
            raise _fault(pointer, "log", f"the stdout of process {params.pid} {what}; name its log")
    known = {"log": log, "start_ticks": process.start_ticks, "boot_id": process.boot_id}
    return params.model_copy(update=known)


def _not_foreign(pid: int, process: ForeignProcess) -> str | None:
    if process.job_id is not None:
        return f"process {pid} belongs to job {process.job_id}, which is watched already"
    if pid == os.getpid():
        return f"process {pid} is this daemon"
    return f"{pid} is a thread of the kernel" if process.kernel else None


def _another_by_now(params: AdoptParams, process: ForeignProcess) -> str | None:
    ticks = params.start_ticks is None or params.start_ticks == process.start_ticks
    boot = params.boot_id is None or params.boot_id == process.boot_id
    return None if ticks and boot else f"process {params.pid} is another one by now than start_ticks and boot_id name"


def _fault(pointer: str, field: str, text: str) -> Invalid:
    return Invalid.of([FieldError(f"{pointer}/{field}", text)])
