"""How an attempt ended and why, from evidence only: exit record, result event, error event, log."""

from dataclasses import dataclass

from pydantic import BaseModel

from eagle3_core.contract.exits import REASON_OF_EXIT, ExitCode, Reason
from server.domain.progress import Status
from server.domain.signatures import find_signature
from server.domain.states import JobState, Trigger

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


def explain(state: JobState, end: End, status: Status) -> Why | None:
    """Why a job ended as it did; None for one that succeeded."""
    record = end.exit
    if state == JobState.SUCCEEDED:
        return None
    if state == JobState.CANCELLED:
        how = "cancelled on request"
        if record is not None and record.killed_after_grace:
            how += "; killed when its grace was over"
        return Why(Reason.CANCELLED_BY_USER, how)
    return _explain_lost(end) if record is None else _explain_failure(record, end, status)


def _explain_failure(record: ExitRecord, end: End, status: Status) -> Why:
    if record.error is not None:
        return Why(Reason.SPAWN_FAILED, f"the stage could not be started: {record.error}")
    if record.code == ExitCode.STOPPED or (record.signal is not None and record.stop_asked == "signal"):
        return Why(Reason.PREEMPTED, "asked to stop by a signal from outside Eyas", "submit it again")
    if record.signal in _RAISED_BY_ITSELF and (why := _from_log(end, f"killed by {record.signal}")):
        return why
    if record.signal is not None:
        hint = "the kernel's out-of-memory killer sends SIGKILL: see dmesg" if record.signal == "SIGKILL" else None
        return Why(Reason.KILLED_BY_SIGNAL, f"killed by {record.signal}", hint)
    return _explain_code(record.code, end, status)


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
