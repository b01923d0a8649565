"""The `eyas` command against a real daemon."""

import json
import subprocess

import pytest

from client.http import EyasClient, Unreachable
from tests import tiny


@pytest.fixture(scope="module")
def eyas(shared):
    daemon, _ = shared

    def run(*arguments, stdin=None):
        command = daemon.command(*arguments)
        if arguments[0] not in ("checkpoint", "data"):
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
    shown = eyas("job", job["id"]).stdout
    assert "succeeded after" in shown
    assert f"output: {daemon.client.job(job['id'])['output_dir']}\n" in shown
    assert json.loads(eyas("job", job["id"], "--json").stdout)["state"] == "succeeded"
    assert "seen in the log" in eyas("log", job["id"]).stdout
    assert "succeeded" in eyas("cancel", job["id"]).stdout


def test_refusals_are_readable(eyas):
    answer = eyas("submit", "-", stdin='{"stage": "validate", "params": {"chekpoint": "/c"}}')
    assert answer.returncode == 1
    assert "/params/chekpoint: chekpoint is not a field of validate; did you mean checkpoint?" in answer.stderr
    answer = eyas("submit", "-", "--dry-run", stdin="name: x\nstages: {prepare: {params: {}}}\n")
    assert "/stages/prepare/params/verifier: verifier is required" in answer.stderr
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


def test_data_check_needs_no_daemon(eyas, tmp_path):
    store = tiny.make_store(tmp_path / "store", tiny.make_verifier(tmp_path / "verifier"))
    assert eyas("data", "check", str(store)).stdout.startswith("valid  ")
    (store / "shard_00000.safetensors").write_bytes(b"")
    answer = eyas("data", "check", str(store), "--level", "quick", "--json")
    assert answer.returncode == 2
    assert json.loads(answer.stdout)["findings"][0]["code"] == "truncated_file"


def test_what_came_of_a_job_at_the_command_line(shared, eyas, tmp_path):
    daemon, planned = shared
    request = planned(["on_attempt", [1, "raise", "data"]], name="by hand", labels={"model": "kimi"})
    output = daemon.root / "by hand"
    request["params"]["output_dir"] = str(output)
    [job] = json.loads(eyas("submit", "-", "--json", stdin=json.dumps(request)).stdout)["jobs"]
    daemon.wait_ended(job["id"])
    assert job["id"] in eyas("jobs", "--in", "failed", "--label", "model=kimi").stdout
    assert job["id"] not in eyas("jobs", "--in", "succeeded").stdout
    assert "bad_data" in eyas("attempts", job["id"]).stdout
    assert "did you mean failed?" in eyas("jobs", "--in", "faild").stderr
    told, state = eyas("retry", job["id"]).stdout.split()
    assert (told, state in ("queued", "starting")) == (job["id"], True)  # it may have been faster than the answer
    daemon.wait_ended(job["id"])
    assert len(eyas("attempts", job["id"]).stdout.splitlines()) == 2
    (output / "a.json").write_text("{}")
    assert "report" in eyas("artifacts", job["id"]).stdout
    fetched = tmp_path / "b.json"
    assert eyas("artifacts", job["id"], "a.json", "--to", str(fetched)).stdout == f"{fetched}  2 bytes\n"
    assert fetched.read_text() == "{}"
    answer = eyas("artifacts", job["id"], "absent", "--to", str(tmp_path / "absent"))
    assert (answer.returncode, list(tmp_path.iterdir())) == (1, [fetched])
    assert "succeeded in 7 days" in eyas("stats").stdout
    answer = eyas("delete", job["id"], stdin="n\n")
    assert answer.returncode == 1
    assert f"stays  {output}" in answer.stdout
    answer = eyas("delete", job["id"], "--outputs", "--yes")
    assert answer.returncode == 0, answer.stderr
    assert not output.exists()
    assert "there is no job" in eyas("job", job["id"]).stderr


def test_a_pipeline_at_the_command_line(shared, eyas, tmp_path):
    daemon, planned = shared
    stages = {
        "one": {"stage": "validate", "params": planned(["until_stopped", None])["params"]},
        "two": {"stage": "validate", "params": planned()["params"] | {"previous": "${one.output_dir}"}},
    }
    file = tmp_path / "chain.yaml"
    file.write_text(json.dumps({"name": "of two", "stages": stages}))  # JSON is YAML, too
    look = eyas("submit", str(file), "--dry-run")
    assert "nothing was stored" in look.stdout, look.stderr
    made = json.loads(eyas("submit", str(file), "--json").stdout)
    assert "of two" in eyas("pipeline", "list").stdout
    assert "two" in eyas("pipeline", "show", made["id"]).stdout
    daemon.wait_state(made["jobs"][0]["id"], "running")
    assert "of two" in eyas("pipeline", "cancel", made["id"]).stdout
    for job in made["jobs"]:
        assert daemon.wait_ended(job["id"])["state"] == "cancelled"
    file.write_text("name: x\nstages: {one: {stage: validate, parms: {}}}\n")
    assert "did you mean params?" in eyas("submit", str(file)).stderr


def test_an_address_that_leads_nowhere_is_told_of_and_no_other_daemon_is_asked(shared, eyas, monkeypatch):
    daemon, _ = shared

    def remote(*arguments):
        answer = subprocess.run(daemon.command(*arguments), capture_output=True, text=True, timeout=60)
        return answer.returncode, answer.stderr

    monkeypatch.setenv("EYAS_STATE", str(daemon.state))
    monkeypatch.setenv("EYAS_URL", "http://far-away:8765")
    monkeypatch.delenv("EYAS_TOKEN", raising=False)
    assert remote("jobs") == (
        1,
        "eyas: EYAS_URL is set and EYAS_TOKEN is not: the token is in the daemon's state directory\n",
    )
    monkeypatch.setenv("EYAS_TOKEN", "t")
    monkeypatch.setenv("EYAS_URL", "http://[::1")
    assert "'http://[::1' is no address of a daemon" in remote("jobs")[1]
    monkeypatch.setenv("EYAS_URL", daemon.client.url)
    status, said = remote("wait", "nothing")
    assert (status, said) == (125, "eyas: the token is wrong, revoked or expired\n")
    assert eyas("wait", "nothing").returncode == 125
    assert eyas("job", "../healthz").stderr == "eyas: there is no /jobs/../healthz\n"
    assert eyas("job", "..").stderr == "eyas: there is no job '..'\n"


def test_one_that_waits_for_a_daemon_says_so():
    said = []
    with EyasClient("http://127.0.0.1:1", "t", patience_s=1.0) as client:
        client.on_trouble = said.append
        with pytest.raises(Unreachable):
            client.wait("some")
    [once] = said
    assert once.endswith("Connection refused; asking again for 1 s")
