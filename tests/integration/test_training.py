"""The real train stage under the real daemon."""

import json
import os
import signal
from pathlib import Path

from tests.tiny import make_training_inputs


def test_the_daemon_is_killed_while_an_epoch_runs_and_nothing_is_lost_or_doubled(new_daemon, tmp_path, wait_for):
    (tmp_path / "root").mkdir()
    params = make_training_inputs(tmp_path / "root", rows=400, length=32) | {"epochs": 2}
    daemon = new_daemon(OMP_NUM_THREADS="1")
    [stored] = daemon.client.submit({"name": "drafter", "stage": "train", "params": params})

    wait_for(lambda: daemon.client.job(stored["id"])["phase"] == "training", limit_s=60)
    daemon.kill()
    at_kill = daemon.file_events(stored["id"])
    assert [event["phase"] for event in at_kill if event["type"] == "phase"][-1] == "training"
    assert not any(event["type"] == "epoch" for event in at_kill)
    daemon.start()
    job = daemon.wait_ended(stored["id"], limit_s=120)
    assert (job["state"], job["attempt"]) == ("succeeded", 1), job
    assert [(done["epoch"], done["val"] is not None) for done in job["epochs_done"]] == [(0, True), (1, True)]
    events = list(daemon.client.events(stored["id"]))
    assert events == daemon.file_events(stored["id"])
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert len(events) > len(at_kill)
    log = daemon.client.log(stored["id"], limit=8 << 20)
    assert log.data == (daemon.attempt(stored["id"]) / "output.log").read_bytes()
    assert log.next_offset == log.size == len(log.data)
    checkpoints = daemon.client.checkpoints(stored["id"])
    assert [Path(one["path"]).name for one in checkpoints] == ["0", "1"]
    assert {one["verdict"] for one in checkpoints} == {"valid"}, checkpoints
    assert job["last_checkpoint"] == {"path": checkpoints[-1]["path"], "verdict": "valid", "why": None}
    assert job["setup"]
    assert json.loads((daemon.state / "jobs" / stored["id"] / "record.json").read_text())["state"] == "succeeded"


def test_a_training_that_is_cancelled_ends_soon(new_daemon, tmp_path, wait_for):
    (tmp_path / "root").mkdir()
    params = make_training_inputs(tmp_path / "root", rows=40) | {"epochs": 10_000}
    daemon = new_daemon(OMP_NUM_THREADS="1")
    [stored] = daemon.client.submit({"stage": "train", "params": params})
    wait_for(lambda: daemon.client.job(stored["id"])["step"], limit_s=60)
    daemon.client.cancel(stored["id"])
    job = daemon.wait_ended(stored["id"])
    assert (job["state"], job["reason"]) == ("cancelled", "cancelled_by_user")
    assert json.loads((daemon.attempt(stored["id"]) / "exit.json").read_text())["code"] == 75


def test_a_lost_worker_is_followed_by_an_attempt_from_the_latest_sound_checkpoint(new_daemon, tmp_path, wait_for):
    (tmp_path / "root").mkdir()
    params = make_training_inputs(tmp_path / "root", rows=100) | {"epochs": 4}
    daemon = new_daemon(OMP_NUM_THREADS="1")
    request = {"stage": "train", "params": params, "retry": {"backoff_s": 0}}
    [stored] = daemon.client.submit(request)
    wait_for(lambda: daemon.client.checkpoints(stored["id"]) and daemon.client.job(stored["id"])["epoch"], limit_s=60)
    process = json.loads((daemon.attempt(stored["id"]) / "process.json").read_text())
    for who in ("shim", "stage"):
        os.kill(process[who]["pid"], signal.SIGKILL)
    job = daemon.wait_ended(stored["id"], limit_s=90)
    assert (job["state"], job["attempt"]) == ("succeeded", 2), job
    [failed] = [warning for warning in job["warnings"] if warning["code"] == "attempt_failed"]
    assert "worker_lost" in failed["message"]
    [resumed] = [found for found in job["setup"] if found["title"] == "resumed"]
    assert resumed["data"]["step"] % 75 == 0
    assert resumed["data"]["step"] > 0
    assert (job["step"], job["steps"]) == (300, 300)
    assert [Path(one["path"]).name for one in daemon.client.checkpoints(stored["id"])] == ["0", "1", "2", "3"]
    events = list(daemon.client.events(stored["id"]))
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
