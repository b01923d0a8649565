"""States of attempts and jobs.

    attempt     started     stop asked  spawn failed  result + exit 0  exit STOPPED  any other exit  vanished
    starting    running     stopping    failed        done             stopped       failed          lost
    running     -           stopping    -             done             stopped       failed          lost
    stopping    stopping    stopping    stopped       done             stopped       stopped         stopped

done, stopped, failed and lost are for good. A job's state is never stored on its own account: it follows from its
intents, its attempts and its policy:

    no attempt, or another one follows    cancelled if cancelled, paused if paused, else queued
    the last attempt lives                that attempt's state
    it was done                           succeeded
    it stopped, and the job is cancelled  cancelled
    else                                  failed
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class AttemptState(StrEnum):
    """Where one process life is."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"
    LOST = "lost"


class Trigger(StrEnum):
    """What moves an attempt."""

    STARTED = "started"
    STOP_ASKED = "stop_asked"
    SPAWN_FAILED = "spawn_failed"
    FINISHED = "finished"
    EXIT_STOPPED = "exit_stopped"
    EXIT_OTHER = "exit_other"
    VANISHED = "vanished"


class JobState(StrEnum):
    """Where a job is, as clients see it."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


_A, _T = AttemptState, Trigger

TABLE: dict[tuple[AttemptState, Trigger], AttemptState] = {
    (_A.STARTING, _T.STARTED): _A.RUNNING,
    (_A.STARTING, _T.STOP_ASKED): _A.STOPPING,
    (_A.STARTING, _T.SPAWN_FAILED): _A.FAILED,
    (_A.STARTING, _T.FINISHED): _A.DONE,
    (_A.STARTING, _T.EXIT_STOPPED): _A.STOPPED,
    (_A.STARTING, _T.EXIT_OTHER): _A.FAILED,
    (_A.STARTING, _T.VANISHED): _A.LOST,
    (_A.RUNNING, _T.STOP_ASKED): _A.STOPPING,
    (_A.RUNNING, _T.FINISHED): _A.DONE,
    (_A.RUNNING, _T.EXIT_STOPPED): _A.STOPPED,
    (_A.RUNNING, _T.EXIT_OTHER): _A.FAILED,
    (_A.RUNNING, _T.VANISHED): _A.LOST,
    (_A.STOPPING, _T.STARTED): _A.STOPPING,
    (_A.STOPPING, _T.STOP_ASKED): _A.STOPPING,
    (_A.STOPPING, _T.SPAWN_FAILED): _A.STOPPED,
    (_A.STOPPING, _T.FINISHED): _A.DONE,
    (_A.STOPPING, _T.EXIT_STOPPED): _A.STOPPED,
    (_A.STOPPING, _T.EXIT_OTHER): _A.STOPPED,
    (_A.STOPPING, _T.VANISHED): _A.STOPPED,
}

_JOB_OF_ATTEMPT = {
    _A.STARTING: JobState.STARTING,
    _A.RUNNING: JobState.RUNNING,
    _A.STOPPING: JobState.STOPPING,
    _A.DONE: JobState.SUCCEEDED,
    _A.STOPPED: JobState.FAILED,
    _A.FAILED: JobState.FAILED,
    _A.LOST: JobState.FAILED,
}

LIVE_ATTEMPT = frozenset({_A.STARTING, _A.RUNNING, _A.STOPPING})
FINAL_JOB = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
WAITING_JOB = frozenset({JobState.QUEUED, JobState.PAUSED})
LIVE_JOB = frozenset({JobState.STARTING, JobState.RUNNING, JobState.STOPPING})


class IllegalMove(Exception):
    """A trigger that the attempt's state does not know."""


@dataclass(frozen=True)
class Intents:
    """What was decided about a job, apart from what its processes did."""

    cancel: bool = False
    dependency_failed: bool = False
    pause: bool = False


def move(state: AttemptState, trigger: Trigger) -> AttemptState:
    """The state after a trigger.

    Raises:
        IllegalMove: the table has no such move.
    """
    try:
        return TABLE[state, trigger]
    except KeyError:
        raise IllegalMove(f"an attempt that is {state} cannot meet {trigger}") from None


def job_state(intents: Intents, attempts: Sequence[AttemptState], another: bool = False) -> JobState:
    """A job's state. A stop nobody at Eyas asked for is a failure, not a cancel.

    Args:
        intents: what was decided about it.
        attempts: states of its attempts, the latest last.
        another: the policy has another attempt follow the last one, should that have ended without success.
    """
    if not attempts and intents.dependency_failed:
        return JobState.FAILED
    last = attempts[-1] if attempts else None
    if last is None or (another and last not in LIVE_ATTEMPT and last != AttemptState.DONE):
        if intents.cancel:
            return JobState.CANCELLED
        return JobState.PAUSED if intents.pause else JobState.QUEUED
    if last == AttemptState.STOPPED and intents.cancel:
        return JobState.CANCELLED
    return _JOB_OF_ATTEMPT[last]
