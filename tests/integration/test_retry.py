"""Attempts that are followed by another one: after a loss, a reboot, a preemption, and after the daemon's own death."""

import json
import os
import signal
import sqlite3
from datetime import UTC, datetime, timedelta

import pytest

from client.http import ApiError
from eagle3_core.contract import proctree
from eagle3_core.contract.identity import start_ticks

NOW = {"backoff_s": 0}
LATER = {"backoff_s": 3600}


def test_a_lost_worker_is_followed_by_another_attempt(shared, wait_for):
    daemon, planned = shared
    plan = [
        ["event", {"type": "phase", "phase": "working"}],
        ["on_attempt", [1, "event", {"type": "progress", "step": 5, "steps": 9}]],
        ["on_attempt", [1, "child", {}]],
        ["on_attempt", [1, "vanish", None]],
        ["print", "once more"],
    ]
    [stored] = daemon.client.submit(planned(*plan, retry=NOW))
    job = daemon.wait_ended(stored["id"])
    assert (job["state"], job["attempt"], job["reason"], job["cause"]) == ("succeeded", 2, None, None)
    [warning] = job["warnings"]
    assert warning["code"] == "attempt_failed"
    assert "worker_lost" in warning["message"]
    events = list(daemon.client.events(job["id"]))
    assert events == daemon.file_events(job["id"])
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert b"once more" in daemon.client.log(job["id"]).data
    first = daemon.client._send("GET", f"/jobs/{job['id']}/log?attempt=1")
    assert first.headers["X-Log-Attempt"] == "1"
    assert b"once more" not in first.content
    wait_for(lambda: proctree.marked(job["id"]) == [])  # the shim goes once it has written its record
    assert job["elapsed_s"] > 0


def test_only_the_last_end_fails_the_job_and_what_waits_for_it(shared, tmp_path):
    daemon, planned = shared
    chain = [
        planned(["vanish", None], name="first", retry={**NOW, "max_retries": 2}),
        planned(name="second", depends_on=["first"]),
        planned(["on_attempt", [1, "vanish", None]], ["until_file", str(tmp_path / "go")], name="third", retry=NOW),
        planned(name="fourth", depends_on=["third"]),
    ]
    first, second, third, fourth = daemon.client.submit({"jobs": chain})
    job = daemon.wait_ended(first["id"])
    assert (job["state"], job["reason"], job["attempt"]) == ("failed", "worker_lost", 3)
    assert daemon.wait_ended(second["id"])["reason"] == "dependency_failed"
    job = daemon.wait_state(third["id"], "running")
    assert daemon.client.job(fourth["id"])["state"] == "queued"
    (tmp_path / "go").touch()
    assert daemon.wait_ended(fourth["id"])["state"] == "succeeded"


@pytest.mark.parametrize(
    ("plan", "policy", "attempts", "reason"),
    [
        (["raise", "data"], NOW, 1, "bad_data"),
        (["raise", "data"], {**NOW, "on": ["bad_data"], "max_retries": 1}, 2, "bad_data"),
        (["vanish", None], {**NOW, "max_retries": 0}, 1, "worker_lost"),
        (["vanish", None], {**NOW, "on": ["host_rebooted"]}, 1, "worker_lost"),
        (["exit", 75], {**NOW, "max_retries": 1}, 2, "preempted"),
    ],
)
def test_the_policy_decides(shared, plan, policy, attempts, reason):
    daemon, planned = shared
    [stored] = daemon.client.submit(planned(plan, retry=policy))
    job = daemon.wait_ended(stored["id"])
    assert (job["state"], job["attempt"], job["reason"]) == ("failed", attempts, reason)


def test_a_policy_that_cannot_be_is_refused(shared):
    daemon, planned = shared
    for retry, pointer in [
        ({"max_retries": 21}, "/retry/max_retries"),
        ({"backoff_s": -1}, "/retry/backoff_s"),
        ({"on": ["cancelled_by_user"]}, "/retry/on"),
        ({"on": ["bad luck"]}, "/retry/on/0"),
        ({"often": True}, "/retry/often"),
    ]:
        with pytest.raises(ApiError) as refused:
            daemon.client.submit(planned(retry=retry))
        assert refused.value.status == 422
        assert refused.value.fields[0]["pointer"] == pointer
    request = planned()
    del request["retry"]
    job = daemon.client.job(daemon.client.submit(request)[0]["id"])
    assert job["retry"] == {
        "max_retries": 2,
        "backoff_s": 10.0,
        "on": ["worker_lost", "host_rebooted", "preempted"],
    }


def waiting_for_retry(daemon, job_id, wait_for):
    return wait_for(lambda: "another attempt is due" in (job := daemon.client.job(job_id))["summary"] and job)


def test_a_job_between_two_attempts_is_queued_and_its_cancel_is_immediate(shared, wait_for):
    daemon, planned = shared
    [stored] = daemon.client.submit(planned(["vanish", None], retry=LATER))
    job = waiting_for_retry(daemon, stored["id"], wait_for)
    assert (job["state"], job["reason"], job["health"]) == ("queued", None, None)
    assert "as attempt 1 ended: worker_lost" in job["summary"]
    record = json.loads((daemon.state / "jobs" / job["id"] / "record.json").read_text())
    assert record["state"] is None
    assert record["policy"]["retry"]["backoff_s"] == 3600
    daemon.client.cancel(job["id"])
    job = daemon.wait_ended(job["id"])
    assert (job["state"], job["reason"], job["attempt"]) == ("cancelled", "cancelled_by_user", 1)


def test_the_wait_goes_on_over_a_restart_by_the_wall_clock(planned_daemon, planned, wait_for):
    """An end in the future, as after a clock that was set back, waits no longer than the backoff."""
    daemon = planned_daemon()
    due, far = daemon.client.submit(
        {
            "jobs": [
                planned(["on_attempt", [1, "vanish", None]], name="due", retry=LATER),
                planned(["on_attempt", [1, "vanish", None]], name="far", retry=LATER),
            ]
        }
    )
    for one in (due, far):
        waiting_for_retry(daemon, one["id"], wait_for)
    daemon.kill()
    with sqlite3.connect(daemon.state / "eyas.db") as database:
        for one, shift in ((due, timedelta(hours=-2)), (far, timedelta(days=30))):
            ended = (datetime.now(UTC) + shift).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            database.execute("update attempts set ended_at = ? where job_id = ?", (ended, one["id"]))
    database.close()
    daemon.start()
    assert daemon.wait_ended(due["id"])["state"] == "succeeded"
    job = waiting_for_retry(daemon, far["id"], wait_for)
    text = job["summary"].partition("due at ")[2].partition(" UTC")[0]
    left = (datetime.strptime(text, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC) - datetime.now(UTC)).total_seconds()
    assert 3500 < left <= 3601


def test_a_reboot_is_followed_by_another_attempt(planned_daemon, planned):
    daemon = planned_daemon()
    [stored] = daemon.client.submit(planned(["on_attempt", [1, "until_stopped", None]], retry=NOW))
    daemon.wait_state(stored["id"], "running")
    daemon.kill()
    file = daemon.attempt(stored["id"]) / "process.json"
    process = json.loads(file.read_text())
    for role in ("shim", "stage"):
        os.kill(process[role]["pid"], signal.SIGKILL)
    file.write_text(json.dumps({**process, "boot_id": "11111111-2222-3333-4444-555555555555"}))
    daemon.start()
    job = daemon.wait_ended(stored["id"])
    assert (job["state"], job["attempt"]) == ("succeeded", 2)
    assert "host_rebooted" in job["warnings"][0]["message"]


def test_a_cancel_by_file_reaches_a_job_without_a_process(planned_daemon, planned, wait_for):
    daemon = planned_daemon()
    [stored] = daemon.client.submit(planned(["vanish", None], retry=LATER))
    waiting_for_retry(daemon, stored["id"], wait_for)
    daemon.kill()
    (daemon.state / "jobs" / stored["id"] / "control" / "cancel.json").write_text("{}")
    daemon.start()
    job = daemon.wait_ended(stored["id"])
    assert (job["state"], job["reason"], job["attempt"]) == ("cancelled", "cancelled_by_user", 1)


def test_time_limit(shared, wait_for):
    """A stop by policy fails the job, and the stage may save; with retries it is for each attempt anew."""
    daemon, planned = shared
    plan = [["until_stopped_saving", None]]
    [stored] = daemon.client.submit(
        planned(*plan, max_seconds=2, retry={**NOW, "on": ["time_limit"], "max_retries": 1})
    )
    job = daemon.wait_ended(stored["id"])
    assert (job["state"], job["reason"], job["attempt"]) == ("failed", "time_limit", 2)
    assert "max_seconds" in job["cause"]
    record = json.loads((daemon.attempt(job["id"], 2) / "exit.json").read_text())
    assert (record["stop_asked"], record["code"]) == ("time_limit", 75)
    assert record["seconds"] >= 0.4


def test_time_limit_while_the_daemon_is_away(planned_daemon, planned, wait_for):
    daemon = planned_daemon()
    [stored] = daemon.client.submit(planned(["until_stopped_saving", None], max_seconds=1.5))
    daemon.wait_state(stored["id"], "running")
    daemon.kill()
    wait_for(lambda: (daemon.attempt(stored["id"]) / "exit.json").exists())
    daemon.start()
    job = daemon.wait_ended(stored["id"])
    assert (job["state"], job["reason"]) == ("failed", "time_limit")


def test_time_limit_of_a_stage_whose_shim_is_dead(planned_daemon, planned, wait_for):
    daemon = planned_daemon(EYAS_GRACE_S="0.2")
    [stored] = daemon.client.submit(planned(["deaf", None], ["forever", None], max_seconds=1.5))
    daemon.wait_state(stored["id"], "running")
    process = json.loads((daemon.attempt(stored["id"]) / "process.json").read_text())
    os.kill(process["shim"]["pid"], signal.SIGKILL)
    job = daemon.wait_ended(stored["id"])
    assert (job["state"], job["reason"]) == ("failed", "time_limit")
    assert start_ticks(process["stage"]["pid"]) is None
