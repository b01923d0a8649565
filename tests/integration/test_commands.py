"""The `eyas` command against a real daemon."""

import json
import subprocess

import pytest


@pytest.fixture(scope="module")
def eyas(shared):
    daemon, _ = shared

    def run(*arguments, stdin=None):
        command = daemon.command(*arguments)
        if arguments[0] != "checkpoint":
            command += ["--state", str(daemon.state)]
        return subprocess.run(command, capture_output=True, text=True, input=stdin, timeout=60, cwd=daemon.root)

    return run


def test_submit_list_show_log_cancel(shared, eyas):
    daemon, planned = shared
    answer = eyas("submit", "-", "--json", stdin=json.dumps(planned(["print", "seen in the log"], name="by command")))
    assert answer.returncode == 0, answer.stderr
    [job] = json.loads(answer.stdout)["jobs"]
    daemon.wait_ended(job["id"])
    assert f"{job['id']}  by command" in eyas("jobs").stdout
    assert "succeeded after" in eyas("job", job["id"]).stdout
    assert json.loads(eyas("job", job["id"], "--json").stdout)["state"] == "succeeded"
    assert "seen in the log" in eyas("log", job["id"]).stdout
    assert "succeeded" in eyas("cancel", job["id"]).stdout


def test_refusals_are_readable(eyas):
    answer = eyas("submit", "-", stdin='{"stage": "validate", "params": {"chekpoint": "/c"}}')
    assert answer.returncode == 1
    assert "/params/chekpoint: chekpoint is not a field of validate; did you mean checkpoint?" in answer.stderr
    answer = eyas("job", "nothing")
    assert (answer.returncode, answer.stderr) == (1, "eyas: there is no job 'nothing'\n")


def test_without_a_daemon(shared, tmp_path):
    daemon, _ = shared
    command = daemon.command("jobs", "--state", str(tmp_path))
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 1
    assert "no daemon runs on" in answer.stderr


def test_checkpoint_verify_needs_no_daemon(eyas, tmp_path):
    answer = eyas("checkpoint", "verify", str(tmp_path), "--json")
    assert answer.returncode == 3
    assert json.loads(answer.stdout)["verdict"] == "unreadable"
