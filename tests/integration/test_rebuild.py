"""The database is an index: made anew from the job directories, backed up while in use, never lost in silence."""

import json
import os
import sqlite3
import stat
import subprocess
import sys

import pytest

from client.http import EyasClient


def eyas(daemon, *arguments, **environment):
    command, variables = daemon.command(*arguments), {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=daemon.root, env=variables)


def views(daemon, ids):
    """What clients are shown of jobs, save what a rebuild may change."""
    found = {}
    for job_id in ids:
        job = dict(daemon.client.job(job_id))
        job.pop("version")
        for warning in job["warnings"]:
            warning.pop("time")  # of one the daemon itself noted, when it was noted
        found[job_id] = (
            job,
            list(daemon.client.events(job_id)),
            daemon.client._send("GET", f"/jobs/{job_id}/checkpoints").json(),
        )
    return found


@pytest.fixture
def many(planned_daemon, planned, tmp_path):
    """A daemon with a job of every kind."""
    daemon = planned_daemon(EYAS_MAX_RUNNING="20")
    now = {"backoff_s": 0}
    checkpoint = {"type": "checkpoint", "path": "/c/0", "epoch": 0, "step": 4, "bytes": 99}
    verdict = {"type": "verdict", "path": "/c/0", "verdict": "valid", "findings": [], "seconds": 0.5}
    requests = {
        "done": planned(["event", checkpoint], ["event", verdict], name="done"),
        "failed": planned(["raise", "data"], name="failed"),
        "tried thrice": planned(["vanish", None], name="tried thrice", retry={**now, "max_retries": 2}),
        "tried twice": planned(["on_attempt", [1, "vanish", None]], name="tried twice", retry=now),
        "cancelled": planned(["until_stopped", None], name="cancelled"),
        "paused": planned(["until_stopped", None], name="paused"),
        "gone on": planned(["on_attempt", [1, "until_stopped", None]], name="gone on"),
        "running": planned(["until_file", str(tmp_path / "go")], name="running"),
        "later": planned(name="later", depends_on=["running"]),
        "due later": planned(["vanish", None], name="due later", retry={"backoff_s": 3600}),
    }
    jobs = {name: daemon.client.submit(request)[0]["id"] for name, request in requests.items()}
    for name in ("cancelled", "paused", "gone on", "running"):
        daemon.wait_state(jobs[name], "running")
    daemon.client.cancel(jobs["cancelled"])
    daemon.client.pause(jobs["paused"])
    daemon.client.pause(jobs["gone on"])
    daemon.wait_state(jobs["gone on"], "paused")
    daemon.client.resume(jobs["gone on"])
    for name in ("done", "failed", "tried thrice", "tried twice", "cancelled", "gone on"):
        daemon.wait_ended(jobs[name])
    daemon.wait_state(jobs["paused"], "paused")
    daemon.wait_state(jobs["due later"], "queued")
    return daemon, jobs


def test_every_job_is_the_same_after_a_rebuild(many, tmp_path, wait_for):
    daemon, jobs = many
    wait_for(lambda: "attempt_failed" in json.dumps(daemon.client.job(jobs["due later"])))
    before = views(daemon, jobs.values())
    token = daemon.client.create_token("colleague", "read", None)["token"]
    answer = eyas(daemon, "rebuild", "--state", str(daemon.state))
    assert (answer.returncode, "stop it first" in answer.stderr) == (1, True)
    daemon.kill()
    answer = eyas(daemon, "rebuild", "--state", str(daemon.state))
    assert answer.returncode == 0, answer.stderr
    assert "10 jobs (4 unfinished), 13 attempts" in answer.stdout
    assert stat.S_IMODE((daemon.state / "eyas.db").stat().st_mode) == 0o600
    daemon.start()
    wait_for(lambda: daemon.client.job(jobs["running"])["health"] == "ok")
    after = views(daemon, jobs.values())
    with EyasClient(daemon.client.url, token) as colleague:
        assert colleague.job(jobs["done"])["state"] == "succeeded"
    for name in ("running", "paused", "due later"):  # time goes on for them, and a start is known to the moment only
        for moving in ("started_at", "elapsed_s", "last_event_at", "last_seq", "summary"):
            after[jobs[name]][0].pop(moving)
            before[jobs[name]][0].pop(moving)
    for found in (before, after):
        assert "another attempt is due at" in found[jobs["due later"]][0].pop("waiting")
    begun = len(before[jobs["running"]][1])
    assert after[jobs["running"]][1][:begun] == before[jobs["running"]][1]
    before[jobs["running"]][1][:] = after[jobs["running"]][1]
    for name, job_id in jobs.items():
        assert after[job_id] == before[job_id], name
    (tmp_path / "go").touch()
    assert daemon.wait_ended(jobs["later"])["state"] == "succeeded"
    daemon.client.resume(jobs["paused"])
    daemon.wait_state(jobs["paused"], "running")
    assert daemon.client.job(jobs["paused"])["attempt"] == 2


def test_a_lost_database_is_noticed_before_any_job_is(many):
    daemon, jobs = many
    daemon.kill()
    for path in daemon.state.glob("eyas.db*"):
        path.unlink()
    answer = eyas(daemon, "serve", "--state", str(daemon.state), "--port", "0")
    assert answer.returncode == 1
    assert f"`eyas rebuild --state {daemon.state}` makes it anew" in answer.stderr
    [check] = [c for c in doctor(daemon)["checks"] if c["name"] == "jobs"]
    assert (check["level"], check["text"].startswith("10 job directories")) == ("fail", True)
    damaged, gone = jobs["failed"], jobs["done"]
    (daemon.state / "jobs" / damaged / "record.json").write_text("{half")
    (daemon.state / "jobs" / gone / "spec.json").unlink()
    answer = eyas(daemon, "rebuild", "--state", str(daemon.state))
    assert answer.returncode == 1
    assert "8 jobs" in answer.stdout
    assert f"/jobs/{damaged}: JSONDecodeError" in answer.stderr
    assert f"/jobs/{gone}: FileNotFoundError: there is no spec.json" in answer.stderr
    daemon.start()
    assert daemon.client.job(jobs["running"])["state"] == "running"


def doctor(daemon, worker="/bin/false"):
    """What it says; of the worker's environment too, which takes seconds, where that is named."""
    answer = eyas(daemon, "doctor", "--json", "--state", str(daemon.state), EYAS_WORKER_PYTHON=worker)
    assert answer.returncode in (0, 1), answer.stderr
    found = json.loads(answer.stdout)
    assert (answer.returncode == 1) == any(check["level"] == "fail" for check in found["checks"])
    return found


def test_a_backup_of_a_running_daemon_is_put_back_and_brought_up_to_date(many, planned, tmp_path):
    daemon, jobs = many
    place = tmp_path / "backup"
    answer = eyas(daemon, "backup", str(place), "--state", str(daemon.state))
    assert answer.returncode == 0, answer.stderr
    assert sorted(path.name for path in place.iterdir()) == ["eyas.db", "settings.json"]
    assert stat.S_IMODE((place / "eyas.db").stat().st_mode) == 0o600
    assert eyas(daemon, "backup", str(place), "--state", str(daemon.state)).returncode == 1
    [later] = daemon.client.submit(planned(name="after the backup"))
    daemon.wait_ended(later["id"])
    ended = {name: daemon.client.job(jobs[name]) for name in ("done", "failed", "tried thrice")}
    daemon.kill()
    for path in daemon.state.glob("eyas.db*"):
        path.unlink()
    (daemon.state / "eyas.db").write_bytes((place / "eyas.db").read_bytes())
    daemon.start()
    assert {name: daemon.client.job(jobs[name]) for name in ended} == ended
    assert later["id"].encode() in daemon.output or "after the backup" not in str(daemon.client.jobs(100))
    [check] = [c for c in doctor(daemon)["checks"] if c["name"] == "jobs"]
    assert later["id"] in check["text"]
    daemon.kill()
    assert eyas(daemon, "rebuild", "--state", str(daemon.state)).returncode == 0
    daemon.start()
    assert daemon.client.job(later["id"])["state"] == "succeeded"


def test_the_doctor_finds_a_damaged_database(many):
    daemon, _ = many
    healthy = {check["name"]: check["level"] for check in doctor(daemon, sys.executable)["checks"]}
    assert (healthy["database"], healthy["daemon"], healthy["state"], healthy["worker"]) == ("ok", "ok", "ok", "ok")
    daemon.kill()
    database = daemon.state / "eyas.db"
    with sqlite3.connect(database) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    data = bytearray(database.read_bytes())
    data[8192:16384] = b"\xff" * 8192
    database.write_bytes(data)
    [check] = [c for c in doctor(daemon)["checks"] if c["name"] == "database"]
    assert check["level"] == "fail"
    assert eyas(daemon, "backup", str(daemon.root / "b"), "--state", str(daemon.state)).returncode == 1
    assert eyas(daemon, "rebuild", "--state", str(daemon.state)).returncode == 0
    assert {check["name"]: check["level"] for check in doctor(daemon)["checks"]}["database"] == "ok"
