"""Pause, resume, checkpoint now, and every race of them with cancel, start and end."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from client.http import ApiError
from tests.tiny import make_training_inputs

SAVING = ["until_stopped_saving", None]


def saved(job):
    file = Path(job["output_dir"], "saved")
    return file.read_text() if file.exists() else None


def exit_record(daemon, job, number=1):
    return json.loads((daemon.attempt(job["id"], number) / "exit.json").read_text())


def refused(call, *arguments):
    with pytest.raises(ApiError) as error:
        call(*arguments)
    assert error.value.problem["type"] == "urn:eyas:problem:conflict"
    return error.value


def started(daemon, wait_for, request):
    """The job once its stage does what the plan says."""
    [stored] = daemon.client.submit(request)
    wait_for(lambda: daemon.client.job(stored["id"])["phase"] == "here")
    return daemon.client.job(stored["id"])


HERE = ["event", {"type": "phase", "phase": "here"}]


def test_pause_saves_and_resume_goes_on(shared, wait_for):
    daemon, planned = shared
    job = started(daemon, wait_for, planned(HERE, ["on_attempt", [1, *SAVING]], ["print", "went on"]))
    assert daemon.client.pause(job["id"])["pause_asked_at"] is not None
    job = daemon.wait_state(job["id"], "paused")
    assert (job["reason"], job["ended_at"], job["health"], job["warnings"]) == (None, None, None, [])
    assert saved(job) == "True"
    record = exit_record(daemon, job)
    assert (record["code"], record["stop_asked"]) == (75, "pause")
    assert json.loads((daemon.state / "jobs" / job["id"] / "record.json").read_text())["pause_asked_at"] is not None
    assert daemon.client.pause(job["id"])["state"] == "paused"  # twice is once
    daemon.client.resume(job["id"])
    job = daemon.wait_ended(job["id"])
    assert (job["state"], job["attempt"], job["pause_asked_at"]) == ("succeeded", 2, None)
    assert not (daemon.state / "jobs" / job["id"] / "control" / "pause.json").exists()
    assert b"went on" in daemon.client.log(job["id"]).data
    assert refused(daemon.client.pause, job["id"]).status == 409
    assert refused(daemon.client.resume, job["id"]).status == 409


def test_a_pause_uses_up_no_retry(shared, wait_for):
    daemon, planned = shared
    plan = [["on_attempt", [1, *HERE]], ["on_attempt", [1, *SAVING]], ["on_attempt", [2, "vanish", None]]]
    job = started(daemon, wait_for, planned(*plan, retry={"max_retries": 1, "backoff_s": 0}))
    daemon.client.pause(job["id"])
    daemon.wait_state(job["id"], "paused")
    daemon.client.resume(job["id"])
    job = daemon.wait_ended(job["id"])
    assert (job["state"], job["attempt"]) == ("succeeded", 3)


def test_pause_of_a_queued_job_holds_it_and_lets_others_pass(shared, tmp_path, wait_for):
    daemon, planned = shared
    go = tmp_path / "go"
    [first, held, other] = daemon.client.submit(
        {
            "jobs": [
                planned(["until_file", str(go)], name="first"),
                planned(name="held"),
                planned(name="other", depends_on=["first"]),
            ]
        }
    )
    daemon.wait_state(first["id"], "running")
    daemon.client.pause(held["id"])
    job = daemon.wait_state(held["id"], "paused")
    assert job["attempt"] is None
    assert job["summary"] == "paused"
    go.touch()
    assert daemon.wait_ended(other["id"])["state"] == "succeeded"
    assert daemon.client.job(held["id"])["state"] == "paused"
    daemon.client.resume(held["id"])
    job = daemon.wait_ended(held["id"])
    assert (job["state"], job["attempt"]) == ("succeeded", 1)


def test_resume_of_a_held_job_goes_through_the_queue(shared, tmp_path, wait_for):
    daemon, planned = shared
    go = tmp_path / "go"
    first, held = daemon.client.submit({"jobs": [planned(["until_file", str(go)], name="first"), planned(name="held")]})
    daemon.wait_state(first["id"], "running")
    daemon.client.pause(held["id"])
    daemon.wait_state(held["id"], "paused")
    daemon.client.resume(held["id"])
    job = daemon.wait_state(held["id"], "queued")
    assert wait_for(
        lambda: daemon.client.job(held["id"])["summary"] == "queued: 1 job runs at a time (EYAS_MAX_RUNNING)"
    )
    assert job["attempt"] is None
    go.touch()
    assert daemon.wait_ended(held["id"])["state"] == "succeeded"


def test_pause_while_starting_in_every_moment(shared, wait_for):
    """Paused at any moment of its start, resumed, done: never lost, never twice at a time."""
    daemon, planned = shared
    for moment in (None, "", "lock", "process.json", "events.jsonl"):
        [stored] = daemon.client.submit(planned(["on_attempt", [1, "until_stopped", None]], ["print", "truly done"]))
        if moment is not None:
            wait_for((daemon.attempt(stored["id"]) / moment).exists)
        daemon.client.pause(stored["id"])
        job = daemon.wait_state(stored["id"], "paused")
        daemon.client.resume(job["id"])
        wait_for(lambda job_id=job["id"]: daemon.client.job(job_id)["state"] != "paused")
        if (daemon.client.job(job["id"])["attempt"] or 1) == 1 and job["attempt"] is None:
            daemon.client.pause(job["id"])  # it was held before its first attempt, which waits for a stop
            daemon.wait_state(job["id"], "paused")
            daemon.client.resume(job["id"])
        wait_for(
            lambda job_id=job["id"]: daemon.client.job(job_id)["state"] == "succeeded",
            what="the end after the pause",
        )


def test_resume_while_stopping(shared, tmp_path, wait_for):
    """The stop goes on to its end, then another attempt follows without being asked for again."""
    daemon, planned = shared
    go = tmp_path / "go"
    plan = [HERE, ["on_attempt", [1, "deaf_until_file", str(go)]]]
    job = started(daemon, wait_for, planned(*plan))
    daemon.client.pause(job["id"], grace_s=60)
    daemon.wait_state(job["id"], "stopping")
    daemon.client.resume(job["id"])
    assert refused(daemon.client.resume, job["id"]).status == 409
    assert daemon.client.job(job["id"])["state"] == "stopping"
    go.touch()
    job = daemon.wait_ended(job["id"])
    assert (job["state"], job["attempt"]) == ("succeeded", 2)


def test_pause_again_while_stopping_for_a_withdrawn_pause(shared, tmp_path, wait_for):
    daemon, planned = shared
    go = tmp_path / "go"
    job = started(daemon, wait_for, planned(HERE, ["on_attempt", [1, "deaf_until_file", str(go)]]))
    daemon.client.pause(job["id"], grace_s=60)
    daemon.wait_state(job["id"], "stopping")
    daemon.client.resume(job["id"])
    daemon.client.pause(job["id"])
    go.touch()
    assert daemon.wait_state(job["id"], "paused", "succeeded", "failed")["state"] == "paused"
    daemon.client.cancel(job["id"])
    job = daemon.wait_ended(job["id"])
    assert (job["state"], job["reason"]) == ("cancelled", "cancelled_by_user")


def test_pause_while_finishing_is_a_success(shared, tmp_path, wait_for):
    """The stage was asked to stop and finished all the same; there is nothing to resume."""
    daemon, planned = shared
    go = tmp_path / "go"
    job = started(daemon, wait_for, planned(HERE, ["finish_at_file", str(go)]))
    daemon.client.pause(job["id"], grace_s=60)
    daemon.wait_state(job["id"], "stopping")
    go.touch()
    job = daemon.wait_ended(job["id"])
    assert (job["state"], job["reason"]) == ("succeeded", None)
    refused(daemon.client.resume, job["id"])


def test_a_stop_that_comes_when_all_is_done_changes_nothing(shared, wait_for):
    """Python gives signals their default action back while it ends, long before the process is gone."""
    daemon, planned = shared
    [stored] = daemon.client.submit(planned(HERE, ["stopped_at_exit", None]))
    job = daemon.wait_ended(stored["id"])
    assert (job["state"], job["reason"]) == ("succeeded", None)


@pytest.mark.parametrize("checkpoint", [True, False])
def test_pause_then_cancel(shared, tmp_path, wait_for, checkpoint):
    """The cancel counts, and a stage that has not begun to save heeds it."""
    daemon, planned = shared
    go = tmp_path / "go"
    job = started(daemon, wait_for, planned(HERE, ["deaf_until_file", str(go)], SAVING))
    daemon.client.pause(job["id"], grace_s=60)
    daemon.wait_state(job["id"], "stopping")
    daemon.client.cancel(job["id"], grace_s=60, checkpoint=checkpoint)
    wait_for((daemon.state / "jobs" / job["id"] / "control" / "cancel.json").exists)
    go.touch()
    job = daemon.wait_ended(job["id"])
    assert (job["state"], job["reason"], job["attempt"]) == ("cancelled", "cancelled_by_user", 1)
    assert exit_record(daemon, job)["stop_asked"] in ("cancel", "pause")


def test_cancel_of_a_paused_job(shared, wait_for):
    daemon, planned = shared
    job = started(daemon, wait_for, planned(HERE, SAVING))
    daemon.client.pause(job["id"])
    daemon.wait_state(job["id"], "paused")
    daemon.client.cancel(job["id"])
    job = daemon.wait_ended(job["id"])
    assert (job["state"], job["reason"], job["attempt"]) == ("cancelled", "cancelled_by_user", 1)


def test_cancel_then_pause_or_resume_is_refused(shared, tmp_path, wait_for):
    daemon, planned = shared
    go = tmp_path / "go"
    job = started(daemon, wait_for, planned(HERE, ["deaf_until_file", str(go)]))
    daemon.client.cancel(job["id"], grace_s=60)
    assert "is being cancelled" in str(refused(daemon.client.pause, job["id"]))
    assert "is being cancelled" in str(refused(daemon.client.resume, job["id"]))
    daemon.wait_state(job["id"], "stopping")
    go.touch()
    assert daemon.wait_ended(job["id"])["state"] == "cancelled"


def test_a_second_cancel_can_only_make_it_quicker(shared, wait_for):
    daemon, planned = shared
    job = started(daemon, wait_for, planned(["deaf", None], HERE, ["forever", None]))
    daemon.client.cancel(job["id"], grace_s=3600)
    daemon.wait_state(job["id"], "stopping")
    daemon.client.cancel(job["id"], grace_s=7200)
    order = daemon.state / "jobs" / job["id"] / "control" / "cancel.json"
    assert json.loads(order.read_text()) == {"grace_s": 3600.0, "checkpoint": True}
    daemon.client.cancel(job["id"], grace_s=0.1, checkpoint=False)
    job = daemon.wait_ended(job["id"])
    assert (job["state"], exit_record(daemon, job)["killed_after_grace"]) == ("cancelled", True)
    assert json.loads(order.read_text()) == {"grace_s": 0.1, "checkpoint": False}


@pytest.mark.parametrize("checkpoint", [True, False])
def test_cancel_saves_unless_told_otherwise(shared, wait_for, checkpoint):
    daemon, planned = shared
    job = started(daemon, wait_for, planned(HERE, SAVING))
    daemon.client.cancel(job["id"], checkpoint=checkpoint)
    job = daemon.wait_ended(job["id"])
    assert (job["state"], saved(job)) == ("cancelled", str(checkpoint))


def test_a_stage_that_is_killed_in_a_pause_says_so_when_it_goes_on(shared, wait_for):
    daemon, planned = shared
    plan = [["on_attempt", [1, "deaf", None]], HERE, ["on_attempt", [1, "forever", None]]]
    job = started(daemon, wait_for, planned(*plan))
    daemon.client.pause(job["id"], grace_s=0.1)
    job = daemon.wait_state(job["id"], "paused")
    assert [warning["code"] for warning in job["warnings"]] == ["unsaved_pause"]
    daemon.client.resume(job["id"])
    assert daemon.wait_ended(job["id"])["state"] == "succeeded"


def test_a_pause_survives_the_daemon(planned_daemon, planned, wait_for):
    """Asked for, then the daemon dies; and paused, then it dies: the job stays paused until it is resumed."""
    daemon = planned_daemon()
    job = started(daemon, wait_for, planned(HERE, ["on_attempt", [1, *SAVING]]))
    daemon.client.pause(job["id"])
    daemon.kill()
    daemon.start()
    daemon.wait_state(job["id"], "paused")
    daemon.kill()
    daemon.start()
    assert daemon.client.job(job["id"])["state"] == "paused"
    daemon.client.resume(job["id"])
    assert daemon.wait_ended(job["id"])["attempt"] == 2


def test_an_unsupervised_job_can_be_paused(planned_daemon, planned, wait_for):
    daemon = planned_daemon()
    job = started(daemon, wait_for, planned(HERE, ["on_attempt", [1, *SAVING]]))
    process = json.loads((daemon.attempt(job["id"]) / "process.json").read_text())
    os.kill(process["shim"]["pid"], signal.SIGKILL)
    wait_for(lambda: daemon.client.job(job["id"])["health"] == "unsupervised")
    daemon.client.pause(job["id"])
    job = daemon.wait_state(job["id"], "paused")
    assert saved(job) == "True"
    daemon.client.resume(job["id"])
    assert daemon.wait_ended(job["id"])["state"] == "succeeded"


def test_checkpoint_now_is_for_running_trainings(shared, wait_for):
    daemon, planned = shared
    job = started(daemon, wait_for, planned(HERE, SAVING))
    assert "validate" in str(refused(daemon.client.checkpoint_now, job["id"]))
    daemon.client.cancel(job["id"])
    daemon.wait_ended(job["id"])


def test_the_commands(shared, wait_for):
    daemon, planned = shared

    def eyas(*words):
        return subprocess.run(daemon.command(*words), capture_output=True, text=True, timeout=60, check=False)

    state = ["--state", str(daemon.state)]
    job = started(daemon, wait_for, planned(HERE, ["on_attempt", [1, *SAVING]], ["on_attempt", [2, *SAVING]]))
    assert re.match(rf"{job['id']}  (running|stopping)", eyas("pause", job["id"], *state).stdout)
    daemon.wait_state(job["id"], "paused")
    assert eyas("resume", job["id"], *state).returncode == 0
    daemon.wait_state(job["id"], "running")
    refusal = eyas("checkpoint-now", job["id"], *state)
    assert (refusal.returncode, "only a running training" in refusal.stderr) == (1, True)
    assert "name a job" in eyas("cancel").stderr
    assert "is not a job directory" in eyas("cancel", "--local", str(daemon.root)).stderr
    done = eyas("cancel", "--local", str(daemon.state / "jobs" / job["id"]), "--grace", "9", "--no-checkpoint")
    assert done.returncode == 0, done.stderr
    job = daemon.wait_ended(job["id"])
    assert (job["state"], job["reason"], saved(job)) == ("cancelled", "cancelled_by_user", "False")


def test_a_training_is_saved_when_asked_paused_and_goes_on(new_daemon, tmp_path, wait_for):
    (tmp_path / "root").mkdir()
    params = make_training_inputs(tmp_path / "root", rows=700, length=32) | {"epochs": 2}
    daemon = new_daemon(OMP_NUM_THREADS="1")
    [stored] = daemon.client.submit({"stage": "train", "params": params})
    wait_for(lambda: daemon.client.job(stored["id"])["step"], limit_s=60)
    daemon.client.checkpoint_now(stored["id"])
    [first] = wait_for(lambda: [one for one in daemon.client.checkpoints(stored["id"]) if one["verdict"]], limit_s=60)
    assert (Path(first["path"]).name, first["verdict"]) == (f"step_{first['step']}", "valid")
    daemon.client.pause(stored["id"])
    job = daemon.wait_state(stored["id"], "paused", "succeeded", "failed", limit_s=60)
    assert (job["state"], job["warnings"]) == ("paused", [])
    saved_at = json.loads(Path(job["last_checkpoint"]["path"], "manifest.json").read_text())["step"]
    assert saved_at >= first["step"]
    refused(daemon.client.checkpoint_now, job["id"])
    daemon.client.resume(job["id"])
    job = daemon.wait_ended(job["id"], limit_s=120)
    assert (job["state"], job["attempt"], job["step"]) == ("succeeded", 2, job["steps"])
    assert f"at step {saved_at}:" in next(fact["text"] for fact in job["setup"] if fact["title"] == "resumed")
