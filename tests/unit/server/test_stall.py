"""The pace of a job decides when it is stalled; the wall clock never does."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from server.domain.advance import Observation, advance
from server.domain.policy import RetryPolicy
from server.domain.progress import Status, begin_attempt
from server.domain.stall import StallLimits, allowance_s, idle_s
from tests.unit.server.test_advance import NOW, RUNNING, lines

LIMITS = StallLimits(factor=20, floor_s=120, silent_floor_s=1800)


def told(*events, job=RUNNING):
    """The job after events of (boottime, type, fields)."""
    whole = [(n, kind, {**fields, "boottime_s": at}) for n, (at, kind, fields) in enumerate(events, 1)]
    job = replace(job, status=begin_attempt(job.status, 0.0))
    seen = Observation(now=NOW, boottime_s=events[-1][0], lines=lines(*whole), started_boottime_s=0.0)
    return advance(job, seen, quiet_after_s=1e9, stall=LIMITS)[0]


def step(at, number=1):
    return (at, "progress", {"step": number, "steps": 99})


def phase(at, name):
    return (at, "phase", {"phase": name})


@pytest.mark.parametrize(
    ("events", "allowed"),
    [
        ([phase(1, "importing")], 1800),
        ([phase(1, "loading")], 1800),
        ([phase(1, "validating")], 1800),
        ([phase(1, "training")], 120),
        ([phase(1, "training"), step(2), step(3), step(4)], 120),
        ([phase(1, "training"), step(10), step(40), step(70), step(800)], 600),
        ([phase(1, "training"), step(10), step(40), phase(50, "validating")], 1800),
        (
            [phase(1, "extracting"), step(1), step(201), phase(210, "judging"), phase(900, "extracting")],
            4000,
        ),
    ],
)
def test_the_allowance_follows_the_pace_and_the_phase(events, allowed):
    assert allowance_s(told(*events).status, "train", LIMITS) == allowed


@pytest.mark.parametrize("stage", ["external", "adopt"])
def test_a_foreign_program_stalls_only_once_it_has_shown_a_pace(stage):
    assert allowance_s(Status(phase="running"), stage, LIMITS) is None
    paced = Status(phase="training", progress_gaps_s=[2.0, 2.0])
    assert allowance_s(paced, stage, LIMITS) == LIMITS.silent_floor_s
    assert allowance_s(paced.model_copy(update={"progress_gaps_s": [300.0]}), stage, LIMITS) == 300 * LIMITS.factor


def test_a_heartbeat_is_no_progress_and_the_clock_is_none_either():
    job = told(phase(1, "training"), step(2), (100, "heartbeat", {}), (121.5, "heartbeat", {}))
    assert (job.health, idle_s(job.status, 121.5)) == ("ok", 119.5)
    for wall in (NOW + timedelta(days=30), NOW - timedelta(days=30), datetime(2038, 1, 20, tzinfo=UTC)):
        seen = Observation(now=wall, boottime_s=121.9, started_boottime_s=0.0)
        assert advance(job, seen, 1e9, LIMITS)[0].health == "ok"
    late = Observation(now=NOW, boottime_s=122.5, started_boottime_s=0.0)
    stalled = advance(job, late, 1e9, LIMITS)[0]
    assert stalled.health == "stalled"
    assert [warning.code for warning in stalled.status.warnings] == ["stalled"]
    assert advance(stalled, late, 1e9, LIMITS)[0].status.warnings[0].count == 1


def test_boottime_that_went_back_is_no_negative_time():
    assert idle_s(Status(worked_boottime_s=50.0), 10.0) == 0.0


def test_reasons_stay_once_each():
    assert len(RetryPolicy(on=["stalled", "stalled"]).on) == 1
