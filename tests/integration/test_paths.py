"""What is read and served lies within the roots: names, links, races, pickles, code."""

import json
import os
import subprocess
import threading
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from client.http import ApiError
from server.app import ROUTERS
from server.system.beneath import open_beneath
from tests import tiny
from tests.cases import make_case

NAMES = [
    "../secret", "..%2f..%2fsecret", "%2e%2e/secret", "/etc/passwd", "a/../../secret", "..\\secret", "a\0.log",
    ".", "", "link_out", "job\nname", "\u202ename", "C:\\x", "x" * 5000,
]  # fmt: skip


def raw_request(connection, method, path, token):
    """A request whose path is sent as it is; other clients would tidy it up."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


def refuse_names(daemon, names, forbidden):
    """Every name in every place of every route is answered 4xx, raw, encoded once and twice."""
    token = (daemon.state / "token").read_text().strip()
    routes = [(m, r.path) for router in ROUTERS for r in router.routes if "{" in r.path for m in r.methods]
    assert len(routes) >= 9
    url = urlsplit(daemon.client.url)
    connection = HTTPConnection(url.hostname, url.port, timeout=60)
    for method, path in routes:
        for name in names:
            once = quote(name, safe="")
            for written in (once, quote(once, safe=""), quote(name, safe="/.\\%:")):
                place = path.replace("{job_id}", written).replace("{name}", written)
                if written in ("", ".", "./") or len(place) > 60_000:
                    continue  # another route
                status, content = raw_request(connection, method, place, token)
                assert 400 <= status < 500, (method, place[:200], status, content[:200])
                assert forbidden not in content
    connection.close()


def test_fault_23_names_lead_nowhere(shared):
    daemon, _ = shared
    refuse_names(daemon, NAMES[:7], b"root:")


def test_case_k01_path_traversal_in_names(shared, tmp_path):
    daemon, _ = shared
    case = make_case("K01", tmp_path)
    names = json.loads((case / "names.json").read_text())
    assert len(names) == 15
    refuse_names(daemon, names, b"must not be readable")
    outside = {"stage": "validate", "params": {"checkpoint": str(case / "root" / "link_out")}}
    inside = daemon.root / "k01"
    inside.symlink_to(case / "root" / "link_out")
    for body in (outside, {"stage": "validate", "params": {"checkpoint": str(inside)}}):
        with pytest.raises(ApiError) as caught:
            daemon.client.submit(body)
        assert caught.value.status == 403
    for name in names:
        with pytest.raises(ApiError) as caught:
            daemon.client.submit({"stage": "validate", "params": {"checkpoint": name}})
        assert caught.value.status in (403, 422)


def test_fault_23_a_link_in_place_of_log_or_stacks_is_not_followed(shared, tmp_path):
    daemon, planned = shared
    secret = tmp_path / "secret"
    secret.write_text("must not be readable\n")
    [one] = daemon.client.submit(planned(["print", "fine"]))
    daemon.wait_ended(one["id"])
    log = daemon.attempt(one["id"]) / "output.log"
    log.unlink()
    log.symlink_to(secret)
    with pytest.raises(ApiError) as caught:
        daemon.client.log(one["id"])
    assert caught.value.status == 409
    log.unlink()
    os.mkfifo(log)
    with pytest.raises(ApiError) as caught:  # and is not waited for
        daemon.client.log(one["id"])
    assert caught.value.status == 409
    attempts = log.parent.parent
    attempts.rename(attempts.with_name("moved"))
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "output.log").write_text("must not be readable\n")
    attempts.symlink_to(tmp_path)
    with pytest.raises(ApiError) as caught:
        daemon.client.log(one["id"])
    assert caught.value.status == 409


def test_fault_23_a_log_that_becomes_a_link_is_no_cause(shared, tmp_path):
    """The last line of a log is quoted as a cause; that of another file must not be."""
    daemon, planned = shared
    secret = tmp_path / "secret"
    secret.write_text("must not be readable\n")
    go = tmp_path / "go"
    [one] = daemon.client.submit(planned(["until_file", str(go)], ["kill", 9]))
    daemon.wait_state(one["id"], "running")
    log = daemon.attempt(one["id"]) / "output.log"
    log.unlink()
    log.symlink_to(secret)
    go.touch()
    job = daemon.wait_ended(one["id"])
    assert job["reason"] == "killed_by_signal"
    assert "must not be readable" not in json.dumps(job)


def test_a_part_swapped_for_a_link_between_check_and_opening_leads_nowhere(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    for place, text in ((root, "inside"), (outside, "outside")):
        (place / "a" / "b").mkdir(parents=True)
        (place / "a" / "b" / "f").write_text(text)
    link, true = root / "link", root / "a"
    link.symlink_to(outside / "a")
    spare = root / "spare"
    stop = threading.Event()

    def swap():
        while not stop.is_set():
            true.rename(spare)
            link.rename(true)
            true.rename(link)
            spare.rename(true)

    swapper = threading.Thread(target=swap)
    swapper.start()
    read, failed = 0, 0
    try:
        while read < 200 or failed < 200:
            try:
                with open_beneath(root, root / "a" / "b" / "f") as file:
                    assert file.read() == b"inside"
                read += 1
            except OSError:
                failed += 1
    finally:
        stop.set()
        swapper.join()
    with pytest.raises(OSError):  # noqa: PT011 - any
        open_beneath(root, root / ".." / "outside" / "a" / "b" / "f")


def test_links_below_an_input_end_inside_a_root_or_are_refused(shared, tmp_path):
    """As in a cache of Hugging Face: snapshots are links to blobs."""
    daemon, _ = shared
    made = tiny.make_verifier(daemon.root / "blobs" / "v")
    snapshot = daemon.root / "snapshot"
    snapshot.mkdir()
    for file in made.iterdir():
        (snapshot / file.name).symlink_to(file)
    conversations = tiny.make_conversations(daemon.root / "c.jsonl")
    request = {
        "stage": "prepare",
        "params": {"verifier": str(snapshot), "conversations": str(conversations), "draft_vocab_size": 64},
    }
    assert daemon.client.submit(request)
    outside = tmp_path / "outside.json"
    outside.write_text("{}")
    (snapshot / "extra.json").symlink_to(outside)
    with pytest.raises(ApiError) as caught:
        daemon.client.submit(request)
    assert (caught.value.status, caught.value.fields[0]["pointer"]) == (403, "/params/verifier")
    assert f"{snapshot}/extra.json is a link that leads out of the allowed roots" in str(caught.value)
    (snapshot / "extra.json").unlink()
    (snapshot / "extra.json").symlink_to(daemon.state / "token")
    with pytest.raises(ApiError) as caught:
        daemon.client.submit(request)
    assert caught.value.status == 403


@pytest.mark.parametrize("place", [".", "x", "trash/x", "jobs", "eyas.db-wal", "jobs/aaaaaaaaaa/artifacts", ".."])
def test_nothing_is_written_into_the_state_directory_but_by_the_daemon(shared, place):
    daemon, _ = shared
    (daemon.root / "in").mkdir(exist_ok=True)
    params = {"checkpoint": str(daemon.root / "in"), "output_dir": str((daemon.state / place).resolve())}
    with pytest.raises(ApiError) as caught:
        daemon.client.submit({"stage": "validate", "params": params})
    assert caught.value.status in (403, 422)
    assert [field["pointer"] for field in caught.value.fields] == ["/params/output_dir"]


def test_the_state_directory_as_a_whole_is_no_input(shared):
    daemon, _ = shared
    with pytest.raises(ApiError) as caught:
        daemon.client.submit({"stage": "validate", "params": {"checkpoint": str(daemon.state)}})
    assert caught.value.status == 403
    assert "belongs to the daemon" in str(caught.value)


def test_a_root_within_the_state_directory_may_be_written(planned_daemon, planned, tmp_path):
    data = tmp_path / "state" / "data"
    data.mkdir(parents=True)
    daemon = planned_daemon(EYAS_ROOTS=json.dumps([str(data), str(tmp_path / "root")]))
    request = planned()
    request["params"]["output_dir"] = str(data / "out")
    assert daemon.wait_ended(daemon.client.submit(request)[0]["id"])["state"] == "succeeded"


def test_no_argument_becomes_an_option_of_another_program(shared):
    """Shim and stage get one argument, an absolute path, whatever a job is called."""
    daemon, planned = shared
    [one] = daemon.client.submit(planned(["until_stopped", None], name="--help"))
    daemon.wait_state(one["id"], "running")
    process = json.loads((daemon.attempt(one["id"]) / "process.json").read_text())
    for who, module in (("shim", "worker"), ("stage", "worker.run")):
        words = Path(f"/proc/{process[who]['pid']}/cmdline").read_text().split("\0")[:-1]
        assert words[-4:] == ["-P", "-m", module, str(daemon.attempt(one["id"]))]
    daemon.client.cancel(one["id"], 0)


def test_case_k05_no_pickle_runs_through_any_stage(new_daemon, tmp_path):
    """Through judge, training and extraction: pickles are refused, at submit where they would be data or a start for a
    training, and the canary does not appear.
    """
    case = make_case("K05", tmp_path)
    daemon = new_daemon(EYAS_ROOTS=json.dumps([str(case)]), EYAS_MAX_RUNNING="4")
    inputs = tiny.make_training_inputs(daemon.root / "inputs")
    only_bin = tiny.make_verifier(daemon.root / "bin")
    (only_bin / "model.safetensors").unlink()
    (only_bin / "pytorch_model.bin").write_bytes((case / "draft" / "pytorch_model.bin").read_bytes())
    named = tiny.make_verifier(daemon.root / "named")
    (named / "model.safetensors").write_bytes((case / "draft" / "model.safetensors").read_bytes())
    refused = [
        ("extract", {"verifier": str(only_bin), "prepared_dir": inputs["vocab_map_dir"]}, "verifier"),
        ("extract", {"verifier": str(named), "prepared_dir": inputs["vocab_map_dir"]}, "verifier"),
        ("extract", {"verifier": inputs["verifier"], "prepared_dir": str(case / "hidden_states")}, "prepared_dir"),
        ("train", {**inputs, "finetune_from": str(case / "draft"), "output_dir": None}, "finetune_from"),
        ("train", {**inputs, "data_dir": str(case / "hidden_states"), "output_dir": None}, "data_dir"),
    ]
    for stage, params, field in refused:
        with pytest.raises(ApiError) as caught:
            daemon.client.submit({"stage": stage, "params": params})
        assert caught.value.status == 422
        assert caught.value.fields[0]["pointer"] == f"/params/{field}"
    started = [
        {"stage": "validate", "params": {"checkpoint": str(case / "draft")}},
        {"stage": "validate", "params": {"checkpoint": str(case / "draft" / "pytorch_model.bin")}},
        {"stage": "validate", "params": {"checkpoint": str(case / "ckpts" / "0")}},
    ]
    ids = [daemon.client.submit(request)[0]["id"] for request in started]
    ended = [daemon.wait_ended(job_id, limit_s=120) for job_id in ids]
    for job in ended:
        assert (job["state"], job["reason"]) == ("failed", "invalid_checkpoint"), job
    assert list(case.rglob("CANARY")) == []
    code = "import pickle,sys;pickle.load(open(sys.argv[1],'rb'))"
    subprocess.run(["python3", "-c", code, str(case / "hidden_states" / "data_0.pt")], check=True)
    assert (case / "CANARY").exists()  # it would have


def test_code_of_a_verifier_runs_only_where_request_and_settings_say_so(new_daemon, tmp_path):
    cache = {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    daemon = new_daemon(**cache)
    verifier = tiny.make_verifier_with_code(daemon.root / "v")
    conversations = str(tiny.make_conversations(daemon.root / "c.jsonl"))
    params = {"verifier": str(verifier), "conversations": conversations, "draft_vocab_size": 64}
    request = {"stage": "prepare", "params": params}
    job = daemon.wait_ended(daemon.client.submit(request)[0]["id"], limit_s=120)
    assert job["reason"] == "bad_input"
    for word in ("tokenization_own.py", "allow_remote_code: true", "EYAS_ALLOW_REMOTE_CODE=1"):
        assert word in job["cause"]
    request["params"] = {**params, "allow_remote_code": True}
    with pytest.raises(ApiError) as caught:
        daemon.client.submit(request)
    assert caught.value.status == 403
    assert [field["pointer"] for field in caught.value.fields] == ["/params/allow_remote_code"]
    assert not (verifier / "RAN").exists()
    daemon.stop()
    allowing = new_daemon(EYAS_ALLOW_REMOTE_CODE="1", **cache)
    job = allowing.wait_ended(allowing.client.submit(request)[0]["id"], limit_s=120)
    assert job["state"] == "succeeded", job
    assert (verifier / "RAN").exists()
    [fact] = [fact for fact in job["setup"] if fact["title"] == "code of the verifier that may run"]
    assert set(fact["data"]["sha256"]) == {"configuration_own.py", "modeling_own.py", "tokenization_own.py"}
