"""What survives the daemon: jobs, their events and logs, and nothing twice."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from eagle3_core.contract import proctree
from eagle3_core.contract.identity import start_ticks


def whole_story(daemon, job_id):
    """Events and log over HTTP, checked against the files."""
    events = list(daemon.client.events(job_id))
    assert events == daemon.file_events(job_id)
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    log = b""
    while (part := daemon.client.log(job_id, offset=len(log), limit=777)).data:
        log += part.data
    assert log == (daemon.attempt(job_id) / "output.log").read_bytes()
    return events, log


def test_fault_07_a_killed_daemon_adopts_the_running_job(planned_daemon, planned, tmp_path, wait_for):
    daemon = planned_daemon()
    [stored] = daemon.client.submit(planned(["stream", str(tmp_path / "go")]))

    def step():
        return daemon.client.job(stored["id"])["step"] or 0

    for _ in range(3):
        before = step()
        wait_for(lambda before=before: step() > before + 10)
        daemon.kill()
        daemon.start()
        assert daemon.client.job(stored["id"])["state"] == "running"
    (tmp_path / "go").touch()
    job = daemon.wait_ended(stored["id"])
    assert (job["state"], job["attempt"], job["warnings"]) == ("succeeded", 1, [])
    events, log = whole_story(daemon, stored["id"])
    assert [event["step"] for event in events if event["type"] == "progress"] == list(range(1, job["step"] + 1))
    assert log.count(b"line ") == job["step"]


def test_a_job_that_ends_while_the_daemon_is_away(planned_daemon, planned, tmp_path, wait_for):
    daemon = planned_daemon()
    go = tmp_path / "go"
    after = planned(name="after", depends_on=["first"])
    first, second = daemon.client.submit({"jobs": [planned(["until_file", str(go)], name="first"), after]})
    daemon.wait_state(first["id"], "running")
    daemon.kill()
    go.touch()
    wait_for(lambda: (daemon.attempt(first["id"]) / "exit.json").exists())
    daemon.start()
    assert daemon.wait_ended(first["id"])["state"] == "succeeded"
    assert daemon.wait_ended(second["id"])["state"] == "succeeded"
    whole_story(daemon, first["id"])


def test_cancel_by_file_while_the_daemon_is_away(planned_daemon, planned, wait_for):
    daemon = planned_daemon()
    [stored] = daemon.client.submit(planned(["until_stopped", None]))
    daemon.wait_state(stored["id"], "running")
    daemon.kill()
    (daemon.state / "jobs" / stored["id"] / "control" / "cancel.json").write_text("{}")
    wait_for(lambda: (daemon.attempt(stored["id"]) / "exit.json").exists())
    daemon.start()
    job = daemon.wait_ended(stored["id"])
    assert (job["state"], job["reason"]) == ("cancelled", "cancelled_by_user")


def test_sigterm_ends_the_daemon_promptly_and_leaves_the_job(planned_daemon, planned):
    daemon = planned_daemon()
    [stored] = daemon.client.submit(planned(["until_stopped", None]))
    daemon.wait_state(stored["id"], "running")
    assert daemon.stop() == 0
    assert not (daemon.state / "daemon.json").exists()
    process = json.loads((daemon.attempt(stored["id"]) / "process.json").read_text())
    assert start_ticks(process["stage"]["pid"]) == process["stage"]["start_ticks"]
    daemon.start()
    assert daemon.client.job(stored["id"])["state"] == "running"


def pids(daemon, job_id):
    process = json.loads((daemon.attempt(job_id) / "process.json").read_text())
    return process["shim"]["pid"], process["stage"]["pid"]


def test_a_dead_shim_leaves_the_job_running_unsupervised_and_its_result_counts(
    planned_daemon, planned, tmp_path, wait_for
):
    daemon = planned_daemon()
    go = tmp_path / "go"
    [stored] = daemon.client.submit(planned(["until_file", str(go)]))
    daemon.wait_state(stored["id"], "running")
    os.kill(pids(daemon, stored["id"])[0], signal.SIGKILL)
    wait_for(lambda: daemon.client.job(stored["id"])["health"] == "unsupervised")
    assert daemon.client.job(stored["id"])["state"] == "running"
    go.touch()
    assert daemon.wait_ended(stored["id"])["state"] == "succeeded"


@pytest.mark.parametrize("plan", [[["until_stopped", None]], [["deaf", None], ["child", {}], ["forever", None]]])
def test_an_unsupervised_job_can_be_cancelled(planned_daemon, planned, plan, wait_for):
    daemon = planned_daemon()
    [stored] = daemon.client.submit(planned(*plan, ["event", {"type": "phase", "phase": "never"}]))
    daemon.wait_state(stored["id"], "running")
    if plan[0][0] == "deaf":
        wait_for(Path(daemon.client.job(stored["id"])["output_dir"], "child").exists)
    shim, stage = pids(daemon, stored["id"])
    os.kill(shim, signal.SIGKILL)
    wait_for(lambda: daemon.client.job(stored["id"])["health"] == "unsupervised")
    daemon.client.cancel(stored["id"], grace_s=0.3 if plan[0][0] == "deaf" else 20)
    job = daemon.wait_ended(stored["id"])
    assert (job["state"], job["reason"]) == ("cancelled", "cancelled_by_user")
    assert start_ticks(stage) is None
    wait_for(lambda: proctree.marked(stored["id"]) == [])


def test_shim_and_stage_killed_together_are_a_lost_worker(planned_daemon, planned):
    daemon = planned_daemon()
    [stored] = daemon.client.submit(planned(["until_stopped", None]))
    daemon.wait_state(stored["id"], "running")
    daemon.kill()
    for pid in pids(daemon, stored["id"]):
        os.kill(pid, signal.SIGKILL)
    daemon.start()
    job = daemon.wait_ended(stored["id"])
    assert (job["state"], job["reason"]) == ("failed", "worker_lost")


def test_a_process_record_of_another_boot_means_the_host_was_restarted(planned_daemon, planned):
    daemon = planned_daemon()
    [stored] = daemon.client.submit(planned(["until_stopped", None]))
    daemon.wait_state(stored["id"], "running")
    daemon.kill()
    for pid in pids(daemon, stored["id"]):
        os.kill(pid, signal.SIGKILL)
    file = daemon.attempt(stored["id"]) / "process.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "boot_id": "11111111-2222-3333-4444-555555555555"}))
    daemon.start()
    job = daemon.wait_ended(stored["id"])
    assert (job["state"], job["reason"]) == ("failed", "host_rebooted")


def test_an_attempt_that_never_began_is_started_once_in_the_same_directory(planned_daemon, planned, tmp_path):
    """The daemon dies between storing the attempt and spawning: made by taking away all a shim would have left."""
    daemon = planned_daemon()
    [stored] = daemon.client.submit(planned(["until_stopped", None]))
    daemon.wait_state(stored["id"], "running")
    daemon.kill()
    for pid in pids(daemon, stored["id"]):
        os.kill(pid, signal.SIGKILL)
    for name in ("process.json", "events.jsonl", "output.log"):
        (daemon.attempt(stored["id"]) / name).unlink(missing_ok=True)
    script = (
        "import sqlite3, sys\n"
        "db = sqlite3.connect(sys.argv[1])\n"
        "db.execute(\"update jobs set state='starting', status='{}'\")\n"
        "db.execute(\"update attempts set state='starting', started_at=null, event_offset=0\")\n"
        "db.execute('delete from events')\n"
        "db.commit()\n"
    )
    subprocess.run(["python3", "-c", script, str(daemon.state / "eyas.db")], check=True)
    daemon.start()
    job = daemon.wait_state(stored["id"], "running")
    assert job["attempt"] == 1
    daemon.client.cancel(stored["id"])
    assert daemon.wait_ended(stored["id"])["state"] == "cancelled"


def test_a_second_daemon_on_the_same_state_directory_is_refused(planned_daemon):
    daemon = planned_daemon()
    second = subprocess.run(
        daemon.command("serve", "--state", str(daemon.state), "--port", "0"),
        capture_output=True,
        text=True,
        timeout=60,
        cwd=daemon.root,
    )
    assert second.returncode == 1
    assert "in use by another daemon" in second.stderr
    assert daemon.client.url in second.stderr
    assert daemon.client.health()["status"] == "ok"
