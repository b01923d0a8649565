"""How an attempt ended and why, from evidence only: exit record, result event, error event, log."""

from dataclasses import dataclass, replace

from pydantic import BaseModel

from eagle3_core.contract.exits import REASON_OF_EXIT, ExitCode, Reason
from eagle3_core.contract.signatures import find_signature
from server.domain.progress import Status
from server.domain.states import AttemptState, Trigger

_RAISED_BY_ITSELF = frozenset({"SIGABRT", "SIGBUS"})
"""Signals that libraries raise in their own process once they have printed why."""


class ExitRecord(BaseModel):
    """exit.json. Fields of later versions are passed over."""

    code: int | None = None
    signal: str | None = None
    error: str | None = None
    stop_asked: str | None = None
    killed_after_grace: bool = False
    left_behind: int = 0
    seconds: float | None = None
    oom_kills: int | None = None
    oom_group_shared: bool = False
    kernel_log: str | None = None
    shm_free_bytes: int | None = None
    shm_total_bytes: int | None = None

    @property
    def shared_memory_full(self) -> bool:
        """Whether there was next to none left at the end."""
        if self.shm_free_bytes is None or self.shm_total_bytes is None:
            return False
        return self.shm_free_bytes < max(1 << 20, self.shm_total_bytes // 50)

    @property
    def says_nothing(self) -> bool:
        """Whether it does not tell how the stage ended."""
        return self.code is None and self.signal is None and self.error is None


@dataclass(frozen=True)
class End:
    """Evidence of an attempt's end.

    Attributes:
        exit: the shim's record; None when shim and stage are gone without one.
        any_event: the attempt reported at least one event.
        rebooted: the host was started again meanwhile.
        other_host: the host that ran it, when that is not this one.
        last_words: the log's last line.
        log_end: the last bytes of the log.
    """

    exit: ExitRecord | None
    any_event: bool = True
    rebooted: bool = False
    other_host: str | None = None
    last_words: str | None = None
    log_end: bytes = b""

    @property
    def stopped_itself(self) -> bool:
        """Whether the stage put its work down when it was asked to stop."""
        return self.exit is not None and self.exit.code == ExitCode.STOPPED


@dataclass(frozen=True)
class Why:
    """Reason in a word, cause in a line, hint to act on."""

    reason: Reason
    cause: str
    hint: str | None = None


def trigger_of(end: End, status: Status) -> Trigger:
    """What the end means for the attempt's state."""
    record = end.exit
    if record is None:
        return Trigger.VANISHED if status.result is None else Trigger.FINISHED
    if record.error is not None:
        return Trigger.SPAWN_FAILED
    if record.code == ExitCode.DONE and status.result is not None:
        return Trigger.FINISHED
    return Trigger.EXIT_STOPPED if record.code == ExitCode.STOPPED else Trigger.EXIT_OTHER


def explain(state: AttemptState, stop_for: str | None, cancelled: bool, end: End, status: Status) -> Why | None:
    """Why an attempt ended as it did; None for one that was done, or was stopped for a pause.

    Args:
        state: the attempt's state, its end included.
        stop_for: what it was stopped for, as far as the daemon knows.
        cancelled: the job is cancelled, which counts more than any other reason to stop.
        end: the evidence.
        status: what it reported.
    """
    record = end.exit
    if state == AttemptState.DONE:
        return None
    by_shim = None if record is None else _STOPS_BY_SHIM.get(record.stop_asked or "")
    if by_shim or (state == AttemptState.STOPPED and (cancelled or stop_for)):
        why = _explain_stop(stop_for or by_shim, cancelled, record)
        if why is not None and why.reason == Reason.STALLED:
            why = replace(why, cause=why.cause.replace("for too long", f"for too long in the phase {status.phase}"))
        return why
    why = _explain_lost(end) if record is None else _explain_failure(record, end, status)
    return why if why.hint is not None else replace(why, hint=_HINTS.get(why.reason))


_HINTS = {
    Reason.BAD_INPUT: "correct the request and submit it again",
    Reason.BAD_DATA: "mend or make anew the data that `cause` names, and submit again",
    Reason.DIVERGED: "lower lr or grad_clip, or look at the rows that `cause` names",
    Reason.INVALID_CHECKPOINT: "the findings are under /jobs/{id}/checkpoints; go on from the checkpoint before it",
    Reason.GATE_NOT_MET: "train longer or on more data, or lower the gate",
    Reason.OUT_OF_GPU_MEMORY: "lower max_seq_len or batch_tokens, or free the GPU",
    Reason.OUT_OF_HOST_MEMORY: "lower batch_tokens, max_seq_len or num_workers, or give the job more memory",
    Reason.DISK_FULL: "free space on the file systems of output_dir and the state directory, and submit again",
    Reason.IMPORT_ERROR: "install what is missing into the environment of worker_python",
    Reason.SPAWN_FAILED: "worker_python must be an interpreter with Eyas and the stage's packages installed",
    Reason.WORKER_LOST: "see the end of the log and dmesg",
    Reason.INTERNAL_ERROR: "the end of the log says more",
    Reason.KILLED_BY_SIGNAL: "the end of the log may say more",
}

_STOPS_BY_SHIM = {str(Reason.TIME_LIMIT): str(Reason.TIME_LIMIT)}
"""Stops the shim makes on its own account, also while the daemon is away."""

_STOPS_BY_POLICY = {
    str(Reason.TIME_LIMIT): Why(
        Reason.TIME_LIMIT, "ran longer than max_seconds", "give max_seconds more, or leave it out"
    ),
    str(Reason.STALLED): Why(
        Reason.STALLED,
        "no progress for too long",
        "stacks.txt of the attempt says where it stood",
    ),
}


def _explain_stop(stop_for: str | None, cancelled: bool, record: ExitRecord | None) -> Why | None:
    why = Why(Reason.CANCELLED_BY_USER, "cancelled on request") if cancelled else _STOPS_BY_POLICY.get(stop_for or "")
    if why is not None and record is not None and record.killed_after_grace:
        return replace(why, cause=f"{why.cause}; killed when its grace was over")
    return why


def _explain_failure(record: ExitRecord, end: End, status: Status) -> Why:
    if record.error is not None:
        return Why(Reason.SPAWN_FAILED, f"the stage could not be started: {record.error}")
    if record.code == ExitCode.STOPPED or (record.signal is not None and record.stop_asked == "signal"):
        return Why(Reason.PREEMPTED, "asked to stop by a signal from outside Eyas", "submit it again")
    if record.signal is not None:
        return _explain_signal(record.signal, record, end)
    why = _explain_code(record.code, end, status)
    if why.reason == Reason.INTERNAL_ERROR and not record.oom_group_shared:
        # A helper was killed, and the stage stumbled over it.
        return _out_of_host_memory(record, why.cause) or why
    return why


def _explain_signal(signal: str, record: ExitRecord, end: End) -> Why:
    killed = f"killed by {signal}"
    why = None
    if signal == "SIGKILL":
        why = _out_of_host_memory(record, killed)
    elif signal == "SIGBUS" and record.shared_memory_full:
        free = f"{record.shm_free_bytes} of {record.shm_total_bytes} bytes of shared memory were free"
        why = Why(Reason.SHARED_MEMORY_EXHAUSTED, f"{killed}; {free}", _SHARED_MEMORY_HINT)
    elif signal in _RAISED_BY_ITSELF:
        why = _from_log(end, killed)
    return why or Why(Reason.KILLED_BY_SIGNAL, killed, _SIGNAL_HINTS.get(signal))


_SIGNAL_HINTS = {
    "SIGKILL": "not by Eyas; the kernel's out-of-memory killer sends it too, which dmesg would tell",
    "SIGSEGV": "the log ends with the Python stacks of the crash; a native library is at fault",
    "SIGABRT": "the log ends with what the library that gave up had to say",
    "SIGBUS": "shared memory, or the file system of a mapped file, may have been full",
}
_MEMORY_HINT = "lower batch_tokens, max_seq_len or num_workers, or give the job more memory"
_SHARED_MEMORY_HINT = "enlarge /dev/shm (in a container: --shm-size or --ipc=host), or lower num_workers"


def _out_of_host_memory(record: ExitRecord, otherwise: str) -> Why | None:
    """Certain by the counter of the job's memory group, probable by the kernel's log, else not said."""
    if record.oom_kills:
        counted = f"the kernel killed {record.oom_kills} of its memory group's processes for want of memory"
        if record.oom_group_shared:
            counted = f"probably {counted}, a group that other processes share"
        return Why(Reason.OUT_OF_HOST_MEMORY, f"{otherwise}; {counted}", _MEMORY_HINT)
    if record.kernel_log is not None:
        return Why(Reason.OUT_OF_HOST_MEMORY, f"{otherwise}; probably: {record.kernel_log}", _MEMORY_HINT)
    return None


def _explain_lost(end: End) -> Why:
    if end.other_host is not None:
        return Why(Reason.WORKER_LOST, f"it ran on host {end.other_host} and left no exit record")
    if end.rebooted:
        return Why(Reason.HOST_REBOOTED, "the host was restarted while the job ran", "submit it again")
    return Why(Reason.WORKER_LOST, "shim and stage are gone and left no exit record", "see the log and dmesg")


_OF_A_STAGE = frozenset(REASON_OF_EXIT) - {ExitCode.INTERNAL_ERROR, ExitCode.BAD_INPUT}
"""Codes that only a stage of ours gives; 1 and 2 are also Python's own, when it cannot start one."""


def _explain_code(code: int | None, end: End, status: Status) -> Why:
    if code == ExitCode.DONE:
        return Why(Reason.INTERNAL_ERROR, "the stage exited 0 without a result")
    reason = REASON_OF_EXIT.get(code if code is not None else -1, Reason.INTERNAL_ERROR)
    if status.error is not None:
        why = _from_log(end, status.error.cause) if reason == Reason.INTERNAL_ERROR else None
        return why or Why(reason, status.error.cause, status.error.hint)
    words = f"exit code {code}" + (f": {end.last_words}" if end.last_words else "")
    if code == ExitCode.DISK_FULL:
        words += "; the disk of the state directory was too full to say which file it was"
    if not end.any_event and code not in _OF_A_STAGE:
        hint = "worker_python must have Eyas and the stage's packages installed"
        return Why(Reason.SPAWN_FAILED, f"the stage ended before it began ({words})", hint)
    why = _from_log(end, f"exit code {code}") if reason == Reason.INTERNAL_ERROR else None
    return why or Why(reason, words)


def _from_log(end: End, otherwise: str) -> Why | None:
    """What the log's end says where the stage itself has no word for it; `otherwise` is what it does say."""
    said = f"error: {otherwise}".encode()
    before, found, _ = end.log_end.rpartition(said)
    signature = find_signature(before if found else end.log_end)
    if signature is None:
        return None
    echo = otherwise in signature.line or signature.line in otherwise
    return Why(signature.kind.reason, signature.line if echo else f"{signature.line}; {otherwise}", signature.kind.hint)
