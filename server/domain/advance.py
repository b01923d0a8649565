"""What an observation of a job's directory makes of the job. Pure, so that every race can be tested.

Observation (files, locks, processes) + Job --advance--> Job, new events
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from eagle3_core.contract.events import Event
from eagle3_core.contract.exits import Reason
from server.domain.job import CANCEL, PAUSE, Job
from server.domain.outcome import End, Why, explain, trigger_of
from server.domain.progress import Status, add_warning, begin_attempt, end_attempt, fold, read_line
from server.domain.stall import StallLimits, allowance_s, idle_s
from server.domain.states import FINAL_JOB, LIVE_ATTEMPT, AttemptState, JobState, Trigger, move

STALLED = str(Reason.STALLED)
"""The value of `health`, and the reason where the policy ends a stalled attempt."""


@dataclass(frozen=True)
class Observation:
    """One look at a live attempt.

    Attributes:
        lines: (offset behind it, text) of each new line of events.jsonl.
        more: lines are left; the end is not judged before all are read.
        started_boottime_s: when the shim began; None until process.json names a stage.
        supervised: the shim lives.
        stop_ordered: control/cancel.json is there.
        pause_ordered: control/pause.json is there.
        policy_stop: the reason in control/stop.json; None while there is none.
        end: how it ended; None while it lives.
        boottime_s: when the look was taken, and `now` on the wall clock.
    """

    now: datetime
    boottime_s: float
    lines: Sequence[tuple[int, bytes]] = ()
    more: bool = False
    started_boottime_s: float | None = None
    supervised: bool = True
    stop_ordered: bool = False
    pause_ordered: bool = False
    policy_stop: str | None = None
    end: End | None = None


def advance(
    job: Job, seen: Observation, quiet_after_s: float, stall: StallLimits | None = None
) -> tuple[Job, list[tuple[Event, str]]]:
    """The job after an observation, and the events that are new in it."""
    assert job.attempt is not None
    if seen.started_boottime_s is not None and job.attempt.started_at is None:
        job = _started(job, seen, seen.started_boottime_s)
    if seen.stop_ordered:
        job = stop_asked(job, seen.now)
    elif seen.policy_stop is not None:
        job = stop_asked(job, seen.now, seen.policy_stop)
    elif seen.pause_ordered:
        job = stop_asked(job, seen.now, PAUSE)
    assert job.attempt is not None
    # A start resets what is told of an attempt. A full disk may hold back the name of the stage, but not its events.
    begun = job.attempt.started_at is not None or seen.end is not None
    job, events = read_events(job, seen.lines if begun else (), seen.now)
    if seen.end is not None and not seen.more:
        return finish(job, seen.end, seen.now), events
    health = _health(job, seen, quiet_after_s)
    allowed = allowance_s(job.status, job.stage, stall or StallLimits())
    idle = idle_s(job.status, seen.boottime_s)
    if health is not None and job.state == JobState.RUNNING and allowed is not None and (idle or 0.0) > allowed:
        health = STALLED
        if job.health != STALLED:
            text = f"no progress for {allowed:.0f} s in the phase {job.status.phase}; stacks.txt says where it stood"
            job = replace(job, status=add_warning(job.status, "stalled", text, seen.now))
    return replace(job, health=health), events


def finish(job: Job, end: End, now: datetime) -> Job:
    """The job after the end of its attempt: over, paused, or queued for another one."""
    assert job.attempt is not None
    state = move(job.attempt.state, trigger_of(end, job.status))
    status = end_attempt(job.status, None if end.exit is None else end.exit.seconds)
    if end.exit is not None and end.exit.left_behind:
        text = f"{end.exit.left_behind} processes the stage left behind were ended"
        status = add_warning(status, "left_behind", text, now)
    why = explain(state, job.attempt.stop_for, job.intents.cancel, end, status)
    attempt = replace(job.attempt, state=state, ended_at=now)
    if why is not None:
        attempt = replace(attempt, reason=str(why.reason), cause=why.cause)
    ended = replace(job, attempt=attempt, status=status, health=None)
    ended = replace(ended, state=ended.derived_state)
    if ended.state == JobState.CANCELLED and state != AttemptState.STOPPED:
        why = Why(Reason.CANCELLED_BY_USER, "cancelled on request")
    return conclude(ended, why, now) if ended.state in FINAL_JOB else _put_back(ended, end, now)


def _put_back(job: Job, end: End, now: datetime) -> Job:
    """A job that waits for another attempt: what the last one said of its end no longer counts."""
    assert job.attempt is not None
    status = job.status.model_copy(update={"result": None, "error": None})
    number = job.attempt.number
    if job.attempt.reason is not None:
        text = f"attempt {number} ended: {job.attempt.reason}: {job.attempt.cause}; another one follows"
        status = add_warning(status, "attempt_failed", text, now)
    elif not end.stopped_itself:
        text = f"attempt {number} did not put its work down as asked; it goes on from its latest sound checkpoint"
        status = add_warning(status, "unsaved_pause", text, now)
    return replace(job, status=status, waiting=None)


def conclude(job: Job, why: Why | None, now: datetime) -> Job:
    """A job that has ended, with the reason."""
    job = replace(job, ended_at=now, waiting=None, health=None)
    if why is None:
        return job
    return replace(job, reason=str(why.reason), cause=why.cause, hint=why.hint)


def _started(job: Job, seen: Observation, boottime_s: float) -> Job:
    assert job.attempt is not None
    attempt = replace(job.attempt, state=move(job.attempt.state, Trigger.STARTED), started_at=seen.now)
    return replace(
        job,
        attempt=attempt,
        state=replace(job, attempt=attempt).derived_state,
        started_at=job.started_at or seen.now,
        status=begin_attempt(job.status, boottime_s),
    )


def stop_asked(job: Job, now: datetime, stop_for: str = CANCEL) -> Job:
    """The job after an order to stop; one to cancel counts also when it was put there while the daemon was away."""
    assert job.attempt is not None
    if stop_for == CANCEL and job.cancel_asked_at is None and job.attempt.state in LIVE_ATTEMPT:
        job = replace(job, cancel_asked_at=now)
    assert job.attempt is not None
    if job.attempt.state not in (AttemptState.STARTING, AttemptState.RUNNING):
        return job
    state = move(job.attempt.state, Trigger.STOP_ASKED)
    job = replace(job, attempt=replace(job.attempt, state=state, stop_asked_at=now, stop_for=stop_for))
    return replace(job, state=job.derived_state)


def read_events(job: Job, lines: Sequence[tuple[int, bytes]], now: datetime) -> tuple[Job, list[tuple[Event, str]]]:
    """The job after new lines of events.jsonl, (offset behind it, text) each, and the events in them."""
    assert job.attempt is not None
    status: Status = job.status
    offset = job.attempt.event_offset
    events: list[tuple[Event, str]] = []
    for end, line in lines:
        read = read_line(line)
        if read is None:
            text = f"the line at byte {offset} of events.jsonl (attempt {job.attempt.number}) is not an event"
            status = add_warning(status, "broken_event", text, now)
        elif read[0].seq <= status.last_seq:
            text = f"event {read[0].seq} came again after {status.last_seq} and is passed over"
            status = add_warning(status, "repeated_event", text, now)
        else:
            if read[0].seq != status.last_seq + 1:
                text = f"events {status.last_seq + 1} to {read[0].seq - 1} are missing"
                status = add_warning(status, "missing_events", text, now)
            status = fold(status, read[0])
            events.append(read)
        offset = end
    return replace(job, status=status, attempt=replace(job.attempt, event_offset=offset)), events


def _health(job: Job, seen: Observation, quiet_after_s: float) -> str | None:
    if job.state not in (JobState.RUNNING, JobState.STOPPING) or seen.started_boottime_s is None:
        return None
    if not seen.supervised:
        return "unsupervised"
    last = job.status.last_boottime_s
    return "quiet" if last is not None and seen.boottime_s - last > quiet_after_s else "ok"
