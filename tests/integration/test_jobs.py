"""Jobs from POST to their end, with a real daemon, a real shim and a real stage process."""

import json
import os
import signal
from pathlib import Path

import pytest

from client.http import ApiError
from eagle3_core.contract.identity import start_ticks


def test_a_job_runs_and_tells_all(shared):
    daemon, planned = shared
    plan = [
        ["print", "hello ünïcode"],
        ["event", {"type": "phase", "phase": "training"}],
        ["event", {"type": "report", "title": "parameters", "text": "12 in total", "data": {"total": 12}}],
        ["event", {"type": "progress", "step": 3, "steps": 4, "epoch": 1, "epochs": 2, "loss": 2.5,
                   "accuracy": [0.5, 0.25], "lr": 1e-4, "tokens_per_s": 100.0}],
        ["event", {"type": "epoch", "epoch": 1, "epochs": 2, "train_s": 1.5, "val_s": 0.5,
                   "train": {"loss": 2.5}, "val": None}],
        ["event", {"type": "checkpoint", "path": "/x/1", "epoch": 1, "step": 3, "bytes": 10}],
        ["event", {"type": "verdict", "path": "/x/1", "verdict": "valid", "findings": [], "seconds": 0.1,
                   "level": "deep", "servers": [{"version": "a server 1.0", "outcome": "loads", "reasons": []}]}],
        ["event", {"type": "warning", "code": "odd", "message": "an odd thing"}],
        ["event", {"type": "warning", "code": "odd", "message": "an odd thing"}],
    ]  # fmt: skip
    [stored] = daemon.client.submit(planned(*plan))
    assert stored["state"] == "queued"
    job = daemon.wait_ended(stored["id"])
    assert job["state"] == "succeeded", job
    assert (job["reason"], job["cause"], job["hint"], job["health"]) == (None, None, None, None)
    assert (job["phase"], job["epoch"], job["epochs"], job["step"], job["steps"]) == ("training", 1, 2, 3, 4)
    assert (job["loss"], job["accuracy"], job["lr"], job["tokens_per_s"]) == (2.5, [0.5, 0.25], 1e-4, 100.0)
    assert job["epochs_done"] == [{"epoch": 1, "train_s": 1.5, "val_s": 0.5, "train": {"loss": 2.5}, "val": None}]
    assert job["last_checkpoint"] == {"path": "/x/1", "verdict": "valid", "why": None}
    [warning] = job["warnings"]
    assert (warning["code"], warning["message"], warning["count"]) == ("odd", "an odd thing", 2)
    assert job["setup"] == [{"title": "parameters", "text": "12 in total", "data": {"total": 12}}]
    assert job["result"]["data"] == {"plan": "done"}
    assert job["elapsed_s"] > 0
    assert job["eta_s"] is None
    assert job["summary"].startswith("succeeded after")
    [checkpoint] = daemon.client.checkpoints(job["id"])
    assert (checkpoint["epoch"], checkpoint["verdict"], checkpoint["bytes"]) == (1, "valid", 10)
    assert (checkpoint["level"], [server["outcome"] for server in checkpoint["servers"]]) == ("deep", ["loads"])
    assert list(daemon.client.events(job["id"])) == daemon.file_events(job["id"])
    log = daemon.client.log(job["id"])
    assert log.data == (daemon.attempt(job["id"]) / "output.log").read_bytes()
    assert "hello ünïcode".encode() in log.data
    part = daemon.client.log(job["id"], offset=3, limit=5)
    assert (part.data, part.next_offset, part.size) == (log.data[3:8], 8, len(log.data))
    assert daemon.client.jobs()[0]["id"] == job["id"]
    record = json.loads((daemon.state / "jobs" / job["id"] / "record.json").read_text())
    assert record["state"] == "succeeded"


@pytest.mark.parametrize(
    ("plan", "reason", "cause"),
    [
        (["raise", "memory"], "out_of_host_memory", "out of host memory"),
        (["raise", "disk"], "disk_full", "No space left"),
        (["raise", "import"], "import_error", "flash_attn"),
        (["raise", "data"], "bad_data", "row 7 of shard 3"),
        (["raise", "bug"], "internal_error", "KeyError"),
        (["kill", int(signal.SIGKILL)], "killed_by_signal", "SIGKILL"),
        (["kill", int(signal.SIGSEGV)], "killed_by_signal", "SIGSEGV"),
        (["exit", 0], "internal_error", "exited 0 without a result"),
        (["exit", 7], "gate_not_met", "exit code 7"),
        (["exit", 99], "internal_error", "exit code 99"),
        (["exit", 75], "preempted", "a signal from outside"),
    ],
)
def test_reasons_of_failure(shared, plan, reason, cause):
    daemon, planned = shared
    [stored] = daemon.client.submit(planned(plan))
    job = daemon.wait_ended(stored["id"])
    assert (job["state"], job["reason"]) == ("failed", reason)
    assert cause in job["cause"]


def test_numbers_that_are_not_finite_never_break_an_answer(shared):
    daemon, planned = shared
    bare = (
        '{"seq": 4, "time": "2026-01-01T00:00:00Z", "boottime_s": 1, "type": "metric", "step": 1, "values": {"x": NaN}}'
    )
    [stored] = daemon.client.submit(planned(["nan", None], ["raw", bare]))
    job = daemon.wait_ended(stored["id"])
    assert (job["loss"], job["accuracy"], job["step"]) == (None, [None], 1)
    assert any(
        event["type"] == "metric" and event["values"] == {"x": None} for event in daemon.client.events(job["id"])
    )


def test_a_broken_event_line_becomes_a_warning(shared):
    daemon, planned = shared
    [stored] = daemon.client.submit(planned(["raw", '{"seq": 3, "type": "prog'], ["raw", "\x00 ünïcode"]))
    job = daemon.wait_ended(stored["id"])
    assert job["state"] == "succeeded"
    assert [warning["code"] for warning in job["warnings"]] == ["broken_event", "broken_event"]


def test_cancel_of_a_running_job(shared, wait_for):
    daemon, planned = shared
    [stored] = daemon.client.submit(planned(["event", {"type": "phase", "phase": "here"}], ["until_stopped", None]))
    wait_for(lambda: daemon.client.job(stored["id"])["phase"] == "here")
    job = daemon.client.job(stored["id"])
    assert job["health"] == "ok"
    answer = daemon.client.cancel(job["id"])
    assert answer["state"] in ("running", "stopping")
    job = daemon.wait_ended(job["id"])
    assert (job["state"], job["reason"]) == ("cancelled", "cancelled_by_user")
    record = json.loads((daemon.attempt(job["id"]) / "exit.json").read_text())
    assert (record["code"], record["stop_asked"], record["killed_after_grace"]) == (75, "cancel", False)
    assert daemon.client.cancel(job["id"])["state"] == "cancelled"


def test_a_deaf_stage_and_its_children_are_killed_when_the_grace_is_over(shared, wait_for):
    daemon, planned = shared
    plan = [["deaf", None], ["child", {}], ["event", {"type": "phase", "phase": "deaf"}], ["forever", None]]
    [stored] = daemon.client.submit(planned(*plan))
    wait_for(lambda: daemon.client.job(stored["id"])["phase"] == "deaf")
    child = int(Path(daemon.client.job(stored["id"])["output_dir"], "child").read_text())
    assert start_ticks(child) is not None
    daemon.client.cancel(stored["id"], grace_s=0.2)
    job = daemon.wait_ended(stored["id"])
    assert (job["state"], job["reason"]) == ("cancelled", "cancelled_by_user")
    assert "killed" in job["cause"]
    assert start_ticks(child) is None


@pytest.mark.parametrize("options", [{}, {"unmarked": True}])
def test_processes_left_behind_by_a_finished_stage_are_ended(shared, options):
    daemon, planned = shared
    [stored] = daemon.client.submit(planned(["child", options]))
    job = daemon.wait_ended(stored["id"])
    assert job["state"] == "succeeded"
    assert [warning["code"] for warning in job["warnings"]] == ["left_behind"]
    assert start_ticks(int(Path(job["output_dir"], "child").read_text())) is None


def test_cancel_by_file_alone_while_the_shim_watches(shared, wait_for):
    daemon, planned = shared
    [stored] = daemon.client.submit(planned(["until_stopped", None]))
    daemon.wait_state(stored["id"], "running")
    (daemon.state / "jobs" / stored["id"] / "control" / "cancel.json").write_text('{"grace_s": 5}')
    job = daemon.wait_ended(stored["id"])
    assert (job["state"], job["reason"]) == ("cancelled", "cancelled_by_user")


def test_sigterm_to_the_shim_stops_the_stage(shared):
    daemon, planned = shared
    [stored] = daemon.client.submit(planned(["until_stopped", None]))
    daemon.wait_state(stored["id"], "running")
    process = json.loads((daemon.attempt(stored["id"]) / "process.json").read_text())
    os.kill(process["shim"]["pid"], signal.SIGTERM)
    job = daemon.wait_ended(stored["id"])
    assert (job["state"], job["reason"]) == ("failed", "preempted")


def test_a_failed_dependency_fails_what_waits_and_cancel_reaches_queued_jobs(shared, tmp_path):
    daemon, planned = shared
    go = tmp_path / "go"
    chain = [
        planned(["until_file", str(go)], ["raise", "data"], name="first"),
        planned(name="second", depends_on=["first"]),
        planned(name="third", depends_on=["second"]),
        planned(name="beside"),
    ]
    first, second, third, beside = daemon.client.submit({"jobs": chain})
    daemon.wait_state(first["id"], "running")
    assert daemon.client.job(second["id"])["summary"] == "queued: waits for first"
    assert daemon.client.job(beside["id"])["summary"] == "queued: 1 job runs at a time (EYAS_MAX_RUNNING)"
    daemon.client.cancel(beside["id"])
    assert daemon.wait_ended(beside["id"])["reason"] == "cancelled_by_user"
    go.touch()
    assert daemon.wait_ended(first["id"])["reason"] == "bad_data"
    job = daemon.wait_ended(second["id"])
    assert (job["state"], job["reason"]) == ("failed", "dependency_failed")
    assert first["id"] in job["cause"]
    assert daemon.wait_ended(third["id"])["reason"] == "dependency_failed"
    assert not daemon.attempt(second["id"]).exists()


def test_a_chain_runs_in_its_order(shared):
    daemon, planned = shared
    chain = [planned(name="last", depends_on=["begin"]), planned(name="begin")]
    last, begin = daemon.client.submit({"jobs": chain})
    ended = daemon.wait_ended(last["id"])
    assert ended["state"] == "succeeded"
    assert ended["depends_on"] == [begin["id"]]
    assert daemon.client.job(begin["id"])["ended_at"] <= ended["started_at"]


def test_an_occupied_output_directory_is_refused_by_the_stage_too(shared, tmp_path):
    daemon, planned = shared
    request = planned()
    output = daemon.root / "out"
    request["params"]["output_dir"] = str(output)
    [stored] = daemon.client.submit({"jobs": [request]})
    assert daemon.wait_ended(stored["id"])["state"] == "succeeded"
    assert (output / ".eyas-job").read_text().strip() == stored["id"]
    with pytest.raises(ApiError) as refused:
        daemon.client.submit(request)
    assert refused.value.status == 422
    assert refused.value.fields[0]["pointer"] == "/params/output_dir"
    assert stored["id"] in refused.value.fields[0]["message"]
    late = planned(["until_file", str(tmp_path / "go")], name="holder")
    second = planned(name="late", depends_on=["holder"])
    second["params"]["output_dir"] = str(daemon.root / "late")
    _, waiting = daemon.client.submit({"jobs": [late, second]})
    (daemon.root / "late").mkdir()
    (daemon.root / "late" / "thesis.txt").write_text("mine")
    (tmp_path / "go").touch()
    job = daemon.wait_ended(waiting["id"])
    assert (job["state"], job["reason"]) == ("failed", "bad_input")
    assert "occupied" in job["cause"]
    assert (daemon.root / "late" / "thesis.txt").read_text() == "mine"


def test_a_real_stage_with_bad_input(new_daemon, tmp_path):
    daemon = new_daemon()
    (daemon.root / "nothing").mkdir()
    [stored] = daemon.client.submit({"stage": "validate", "params": {"checkpoint": str(daemon.root / "nothing")}})
    job = daemon.wait_ended(stored["id"])
    assert (job["state"], job["reason"]) == ("failed", "invalid_checkpoint")
    assert "nothing" in job["cause"]
    last = job["last_checkpoint"]
    assert (last["path"], last["verdict"]) == (str(daemon.root / "nothing"), "unreadable")
    assert last["why"] in job["cause"]
    assert job["summary"].endswith("checkpoint nothing unreadable")  # the cause has said why


def test_a_worker_python_without_eyas_is_a_spawn_failure(new_daemon, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no module named worker >&2\nexit 1\n")
    python.chmod(0o755)
    daemon = new_daemon(EYAS_WORKER_PYTHON=str(python))
    [stored] = daemon.client.submit({"stage": "validate", "params": {"checkpoint": str(daemon.root)}})
    job = daemon.wait_ended(stored["id"])
    assert (job["state"], job["reason"]) == ("failed", "spawn_failed")
    assert "no module named worker" in job["cause"]
    python.unlink()
    [stored] = daemon.client.submit({"stage": "validate", "params": {"checkpoint": str(daemon.root)}})
    job = daemon.wait_ended(stored["id"])
    assert (job["state"], job["reason"]) == ("failed", "spawn_failed")
    assert str(python) in job["cause"]
