"""Observations move jobs: each end, each race, each odd line."""

import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from eagle3_core.contract.exits import Reason
from server.domain.advance import Observation, advance, finish, stop_asked
from server.domain.job import Attempt, Dependency, Job
from server.domain.outcome import End, ExitRecord
from server.domain.queue import Finish, Host, Start, Wait, decide
from server.domain.resources import Resources
from server.domain.states import AttemptState, JobState
from server.domain.view import duration, summary_of, view_of

NOW = datetime(2026, 1, 1, tzinfo=UTC)
QUEUED = Job(number=1, id="j1", name="train", stage="train", params={}, output_dir="/o", created_at=NOW)
STARTING = replace(QUEUED, state=JobState.STARTING, attempt=Attempt(1, AttemptState.STARTING))
RUNNING = replace(QUEUED, state=JobState.RUNNING, attempt=Attempt(1, AttemptState.RUNNING, started_at=NOW))
STOPPING = replace(
    RUNNING, state=JobState.STOPPING, attempt=replace(RUNNING.attempt, state=AttemptState.STOPPING), cancel_asked_at=NOW
)


def lines(*events, start=0):
    found, offset = [], start
    for one in events:
        if isinstance(one, bytes):
            text = one
        else:
            seq, kind, fields = one
            whole = {"seq": seq, "time": "2026-01-01T00:00:00Z", "boottime_s": 1.0, "type": kind, **fields}
            text = json.dumps(whole).encode()
        offset += len(text) + 1
        found.append((offset, text))
    return found


RESULT = (1, "result", {"data": {}, "artifacts": {}})
ERROR = (1, "error", {"exit_code": 3, "cause": "row 7 is damaged", "hint": "make it anew"})


def look(job, **seen):
    seen.setdefault("started_boottime_s", 1.0)
    return advance(job, Observation(now=NOW, boottime_s=10.0, **seen), quiet_after_s=60)


@pytest.mark.parametrize(
    ("job", "events", "end", "state", "reason"),
    [
        (RUNNING, [RESULT], End(ExitRecord(code=0)), "succeeded", None),
        (STARTING, [RESULT], End(ExitRecord(code=0)), "succeeded", None),
        (STOPPING, [RESULT], End(ExitRecord(code=0)), "succeeded", None),
        (RUNNING, [], End(ExitRecord(code=0)), "failed", Reason.INTERNAL_ERROR),
        (RUNNING, [ERROR], End(ExitRecord(code=3)), "failed", Reason.BAD_DATA),
        (RUNNING, [], End(ExitRecord(signal="SIGKILL")), "failed", Reason.KILLED_BY_SIGNAL),
        (RUNNING, [], End(ExitRecord(code=75)), "failed", Reason.PREEMPTED),
        (RUNNING, [], End(ExitRecord(signal="SIGTERM", stop_asked="signal")), "failed", Reason.PREEMPTED),
        (STOPPING, [], End(ExitRecord(code=75, stop_asked="cancel")), "cancelled", Reason.CANCELLED_BY_USER),
        (STOPPING, [ERROR], End(ExitRecord(code=3, stop_asked="cancel")), "cancelled", Reason.CANCELLED_BY_USER),
        (STOPPING, [], End(ExitRecord(signal="SIGKILL")), "cancelled", Reason.CANCELLED_BY_USER),
        (STOPPING, [], End(None), "cancelled", Reason.CANCELLED_BY_USER),
        (RUNNING, [], End(None), "failed", Reason.WORKER_LOST),
        (RUNNING, [], End(None, rebooted=True), "failed", Reason.HOST_REBOOTED),
        (RUNNING, [], End(None, other_host="elsewhere"), "failed", Reason.WORKER_LOST),
        (RUNNING, [RESULT], End(None), "succeeded", None),
        (RUNNING, [], End(ExitRecord(code=1), any_event=False), "failed", Reason.SPAWN_FAILED),
        (RUNNING, [], End(ExitRecord(code=8), any_event=False), "failed", Reason.DISK_FULL),
    ],
)
def test_ends(job, events, end, state, reason):
    new, _ = look(job, lines=lines(*events), end=end)
    assert (new.state, new.reason) == (state, reason)
    assert new.ended_at == NOW
    assert (new.cause is None) == (reason is None)
    json.loads(view_of(new).model_dump_json())
    assert summary_of(new).startswith(state)


def test_a_spawn_failure_before_anything_began():
    new, _ = look(STARTING, started_boottime_s=None, end=End(ExitRecord(error="no such file")))
    assert (new.state, new.reason) == ("failed", Reason.SPAWN_FAILED)
    assert "no such file" in new.cause


def test_events_that_come_before_the_stage_is_named_wait_for_its_start():
    """The shim could not write process.json on a full disk; meanwhile the stage did its work."""
    early, events = look(STARTING, started_boottime_s=None, lines=lines(RESULT))
    assert (early.state, early.attempt.event_offset, events) == ("starting", 0, [])
    begun, events = look(early, lines=lines(RESULT))
    assert (begun.state, len(events)) == ("running", 1)
    ended, _ = look(begun, end=End(ExitRecord(code=0)))
    assert ended.state == "succeeded"
    unnamed, _ = look(early, started_boottime_s=None, lines=lines(RESULT), end=End(ExitRecord(code=0)))
    assert unnamed.state == "succeeded"


def test_an_end_is_not_judged_before_all_lines_are_read():
    new, _ = look(RUNNING, more=True, end=End(ExitRecord(code=0)))
    assert new.state == JobState.RUNNING
    new, _ = look(new, lines=lines(RESULT), end=End(ExitRecord(code=0)))
    assert new.state == JobState.SUCCEEDED


def test_odd_lines_are_warned_of_and_the_offset_goes_on():
    new, events = look(
        RUNNING, lines=lines((1, "heartbeat", {}), b"half a li", (1, "heartbeat", {}), (4, "heartbeat", {}))
    )
    assert [event.seq for event, _ in events] == [1, 4]
    assert [warning.code for warning in new.status.warnings] == ["broken_event", "repeated_event", "missing_events"]
    assert (
        new.attempt.event_offset
        == lines((1, "heartbeat", {}), b"half a li", (1, "heartbeat", {}), (4, "heartbeat", {}))[-1][0]
    )


def test_an_order_to_stop_that_lies_in_the_directory_is_a_cancel():
    new, _ = look(RUNNING, stop_ordered=True)
    assert (new.state, new.cancel_asked_at) == (JobState.STOPPING, NOW)
    new, _ = look(STARTING, stop_ordered=True)
    assert new.state == JobState.STOPPING
    again, _ = look(new, stop_ordered=True)
    assert again.state == JobState.STOPPING


def test_a_job_that_never_began_can_be_cancelled():
    new = finish(stop_asked(STARTING, NOW), End(None), NOW)
    assert (new.state, new.reason) == (JobState.CANCELLED, Reason.CANCELLED_BY_USER)


def test_health():
    assert look(STARTING, started_boottime_s=None)[0].health is None
    running, _ = look(STARTING)
    assert (running.state, running.health) == (JobState.RUNNING, "ok")
    assert look(running, supervised=False)[0].health == "unsupervised"
    late = Observation(now=NOW, boottime_s=62.0, started_boottime_s=1.0)
    assert advance(running, late, quiet_after_s=60)[0].health == "quiet"


def queued(number, *needs, **changes):
    depends_on = tuple(Dependency(f"d{place}", f"dep{place}", state, None) for place, state in enumerate(needs))
    return replace(QUEUED, number=number, id=f"j{number}", depends_on=depends_on, **changes)


def test_the_queue_is_fair_and_says_why():
    jobs = [
        queued(5),
        queued(4),
        queued(3, JobState.FAILED, JobState.SUCCEEDED),
        queued(2, JobState.RUNNING, JobState.SUCCEEDED),
        queued(1, cancel_asked_at=NOW),
    ]
    decided = {decision.job.number: decision for decision in decide(jobs, Host(max_running=1))}
    assert isinstance(decided[1], Finish)
    assert decided[1].why.reason == Reason.CANCELLED_BY_USER
    assert decided[2] == Wait(jobs[3], "waits for dep0")
    assert decided[3].why.reason == Reason.DEPENDENCY_FAILED
    assert decided[4] == Start(replace(jobs[1], resources=Resources(gpus=0)))
    assert decided[5] == Wait(jobs[0], "1 job runs at a time (EYAS_MAX_RUNNING)")
    assert decide([replace(RUNNING, number=9), queued(1)], Host(max_running=1)) == [
        Wait(queued(1), "1 job runs at a time (EYAS_MAX_RUNNING)")
    ]
    assert decide([replace(RUNNING, number=9), queued(1)], Host(max_running=2)) == [
        Start(replace(queued(1), resources=Resources(gpus=0)))
    ]
    watching = replace(queued(1), stage="adopt")  # takes no slot and waits for none
    assert decide([replace(RUNNING, number=9), watching], Host(max_running=1)) == [Start(watching)]
    assert decide([replace(RUNNING, number=9, stage="adopt"), queued(1)], Host(max_running=1)) == [
        Start(replace(queued(1), resources=Resources(gpus=0)))
    ]


def test_summaries_are_for_people():
    progress = {
        "step": 57,
        "steps": 114,
        "epoch": 1,
        "epochs": 5,
        "loss": 3.14159,
        "tokens_per_s": 1450.2,
        "eta_s": 130.0,
    }
    events = lines(
        (1, "phase", {"phase": "training"}),
        (2, "progress", progress),
        (3, "checkpoint", {"path": "/out/0", "epoch": 0, "step": 50, "bytes": 1}),
    )
    new, _ = look(RUNNING, lines=events)
    assert summary_of(new) == (
        "running; training, epoch 2 of 5, 57 of 114 steps (50 %), loss 3.142, 1450 tokens/s, about 2 min 10 s left; "
        "checkpoint 0 not judged yet"
    )
    assert view_of(new).epoch == 1
    findings = [{"severity": "warning", "message": "lm_head.weight has 7 rows that repeat another"}]
    verdict = {"path": "/out/0", "verdict": "suspect", "findings": findings, "seconds": 1}
    judged, _ = look(RUNNING, lines=events + lines((4, "verdict", verdict)))
    assert summary_of(judged).endswith("checkpoint 0 suspect: lm_head.weight has 7 rows that repeat another")
    pausing = replace(judged, state=JobState.STOPPING, pause_asked_at=NOW)
    assert summary_of(pausing).startswith("stopping, to be paused; training, epoch 2 of 5")
    assert " left" not in summary_of(pausing)  # what is left is not what the stop takes
    assert summary_of(replace(pausing, cancel_asked_at=NOW)).startswith("stopping, to be cancelled; ")
    assert [duration(seconds) for seconds in (0.4, 59, 61, 3700)] == ["0 s", "59 s", "1 min 1 s", "1 h 1 min"]


FULL = {"shm_free_bytes": 4096, "shm_total_bytes": 64 << 20}


@pytest.mark.parametrize(
    ("exit_record", "events", "reason", "words"),
    [
        (ExitRecord(signal="SIGKILL", oom_kills=1), [], Reason.OUT_OF_HOST_MEMORY, "the kernel killed 1"),
        (ExitRecord(signal="SIGKILL", kernel_log="Killed process 7"), [], Reason.OUT_OF_HOST_MEMORY, "probably"),
        (ExitRecord(signal="SIGKILL", oom_kills=1, oom_group_shared=True), [], Reason.OUT_OF_HOST_MEMORY, "probably"),
        (ExitRecord(code=1, oom_kills=1, oom_group_shared=True), [], Reason.INTERNAL_ERROR, "exit code 1"),
        (ExitRecord(signal="SIGKILL", oom_kills=0), [], Reason.KILLED_BY_SIGNAL, "SIGKILL"),
        (ExitRecord(signal="SIGSEGV", oom_kills=1), [], Reason.KILLED_BY_SIGNAL, "SIGSEGV"),
        (ExitRecord(code=1, oom_kills=1), [], Reason.OUT_OF_HOST_MEMORY, "exit code 1; the kernel killed 1"),
        (ExitRecord(code=3, oom_kills=1), [ERROR], Reason.BAD_DATA, "row 7"),
        (ExitRecord(signal="SIGBUS", **FULL), [], Reason.SHARED_MEMORY_EXHAUSTED, "shared memory"),
        (
            ExitRecord(signal="SIGBUS", shm_free_bytes=32 << 20, shm_total_bytes=64 << 20),
            [],
            Reason.KILLED_BY_SIGNAL,
            "SIGBUS",
        ),
    ],
)
def test_evidence_of_the_system(exit_record, events, reason, words):
    new, _ = look(RUNNING, lines=lines(*events), end=End(exit_record))
    assert new.reason == reason
    assert words in new.cause
    assert new.hint


def test_a_time_limit_the_shim_kept_alone_counts_also_when_it_had_to_kill():
    end = End(ExitRecord(signal="SIGKILL", stop_asked="time_limit", killed_after_grace=True))
    new, _ = look(RUNNING, end=end)
    assert (new.state, new.reason) == ("failed", Reason.TIME_LIMIT)
    assert "killed when its grace was over" in new.cause
