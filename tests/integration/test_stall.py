"""Work that does not go on: found by its own pace, told with the line it stands at, ended where the policy says so."""

import inspect
import json
import os
import signal
import threading

import pytest

from client.http import ApiError
from tests.integration.double import planned_stage

TRAINING = ["event", {"type": "phase", "phase": "training"}]
QUICK = {"EYAS_STALL_AFTER_S": "0.5", "EYAS_GRACE_S": "0.3"}


def line_of(function, word):
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if word in line)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_deadlocked_data_loader_is_found_shown_and_ended(planned_daemon, planned, method):
    daemon = planned_daemon(**QUICK)
    [stored] = daemon.client.submit(planned(["deadlocked_loader", method], on_stall="stop"))
    job = daemon.wait_ended(stored["id"], limit_s=60)
    assert (job["state"], job["reason"]) == ("failed", "stalled"), job
    assert "in the phase training" in job["cause"]
    assert job["hint"]
    assert "stalled" in [warning["code"] for warning in job["warnings"]]
    stacks = (daemon.attempt(job["id"]) / "stacks.txt").read_text()
    line = line_of(planned_stage.Deadlocked.__getitem__, "here it stands")
    assert f'planned_stage.py", line {line} in __getitem__' in stacks
    line = line_of(planned_stage._deadlocked_loader, "next(rows)")
    assert f'planned_stage.py", line {line} in _deadlocked_loader' in stacks
    assert stacks.startswith("== stack stalled-")
    assert "\n== end stalled-" in stacks
    record = json.loads((daemon.attempt(job["id"]) / "exit.json").read_text())
    assert record["stop_asked"] == "stalled"


def test_a_stall_is_reported_and_over_when_the_work_goes_on(planned_daemon, planned, tmp_path, wait_for):
    daemon = planned_daemon(**QUICK)
    go = tmp_path / "go"
    progress = ["event", {"type": "progress", "step": 1, "steps": 9}]
    plan = [TRAINING, ["until_file", str(go)], progress, ["until_file", str(tmp_path / "end")]]
    [stored] = daemon.client.submit(planned(*plan))
    job = wait_for(lambda: (found := daemon.client.job(stored["id"]))["health"] == "stalled" and found)
    assert job["state"] == "running"
    assert "stalled" in job["summary"]
    wait_for(lambda: (file := daemon.attempt(job["id"]) / "stacks.txt").exists() and "== end" in file.read_text())
    go.touch()
    wait_for(lambda: daemon.client.job(job["id"])["step"] == 1)
    (tmp_path / "end").touch()
    assert daemon.wait_ended(job["id"])["state"] == "succeeded"


def test_a_stalled_attempt_is_tried_again_by_policy(planned_daemon, planned):
    daemon = planned_daemon(**QUICK)
    plan = [["on_attempt", [1, *TRAINING]], ["on_attempt", [1, "forever", None]]]
    retry = {"on": ["stalled"], "backoff_s": 0, "max_retries": 1}
    [stored] = daemon.client.submit(planned(*plan, on_stall="stop", retry=retry))
    job = daemon.wait_ended(stored["id"])
    assert (job["state"], job["attempt"]) == ("succeeded", 2)


def test_stack_on_demand(shared, wait_for, tmp_path):
    daemon, planned = shared
    go = tmp_path / "go"
    [stored] = daemon.client.submit(planned(["child", {}], TRAINING, ["finish_at_file", str(go)]))
    wait_for(lambda: daemon.client.job(stored["id"])["phase"] == "training")
    texts = []
    threads = [threading.Thread(target=lambda: texts.append(daemon.client.stack(stored["id"]))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for text in texts:
        assert "in _finish_at_file" in text
        assert "Current thread" in text or "Thread 0x" in text
        assert " helper: " in text
    assert daemon.client.job(stored["id"])["state"] == "running"
    process = json.loads((daemon.attempt(stored["id"]) / "process.json").read_text())
    os.kill(process["stage"]["pid"], signal.SIGSTOP)  # frozen: the kernel still tells something
    try:
        assert "State:" in daemon.client.stack(stored["id"])
    finally:
        os.kill(process["stage"]["pid"], signal.SIGCONT)
    go.touch()
    daemon.wait_ended(stored["id"])
    with pytest.raises(ApiError) as refused:
        daemon.client.stack(stored["id"])
    assert refused.value.status == 409
