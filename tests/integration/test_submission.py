"""Requests that are refused, with the field and what to do; nothing of a refused chain is stored."""

import json

import httpx
import pytest

from client.http import ApiError


def refused(daemon, request):
    before = [job["id"] for job in daemon.client.jobs()]
    with pytest.raises(ApiError) as error:
        daemon.client.submit(request)
    assert [job["id"] for job in daemon.client.jobs()] == before
    problem = error.value.problem
    assert problem["status"] == error.value.status
    return error.value


def field(error):
    return error.fields[0]["pointer"], error.fields[0]["message"], error.fields[0]["suggestion"]


def test_unknown_fields_come_with_a_suggestion(shared):
    daemon, _ = shared
    error = refused(daemon, {"stage": "train", "params": {"verifier": "/v", "data_dir": "/d", "max_seq_length": 9}})
    assert error.status == 422
    pointers = {one["pointer"]: one for one in error.fields}
    assert pointers["/params/max_seq_length"]["suggestion"] == "max_seq_len"
    assert "did you mean max_seq_len?" in pointers["/params/max_seq_length"]["message"]
    error = refused(daemon, {"stage": "validate", "param": {}, "params": {}})
    assert field(error) == ("/param", "param is not a field; did you mean params?", "params")
    params = {"verifier": "/v", "data_dir": "/d", "vocab_map_dir": "/m", "scheduler": "cosin"}
    error = refused(daemon, {"stage": "train", "params": params})
    assert (field(error)[0], field(error)[2]) == ("/params/scheduler", "cosine")
    error = refused(daemon, {"jobs": [{"stage": "validate", "params": {}, "a/b~c": 1}]})
    assert error.fields[0]["pointer"] == "/jobs/0/a~1b~0c"
    error = refused(daemon, {"stage": "trian", "params": {}})
    assert field(error)[0] == "/stage"
    assert field(error)[2] == "train"
    error = refused(daemon, {"jobs": [{"stage": "validate", "params": {"checkpoint": 3}}]})
    assert field(error)[0] == "/jobs/0/params/checkpoint"


def test_mistakes_of_a_newcomer_are_answered_with_what_to_do(shared):
    daemon, _ = shared
    words = {"verifier": "Qwen/Qwen3-8B", "data_dir": "states", "vocab_map_dir": "~/prepared"}
    error = refused(daemon, {"stage": "train", "params": words})
    hub, relative, home = (one["message"] for one in error.fields)
    assert hub.endswith("; a model on a hub is downloaded first and named by its directory")
    assert relative == "states is not an absolute path on the daemon's host"
    assert home.endswith("; ~ is not expanded")

    names = {"target_model_path": "/v", "learning_rate": 1e-4, "num_epochs": 3, "hidden_states_path": "/d"}
    error = refused(daemon, {"stage": "train", "params": names})
    assert {one["suggestion"] for one in error.fields} == {None, "verifier", "lr", "epochs", "data_dir"}
    assert "verifier is required" in [one["message"] for one in error.fields]

    error = refused(daemon, {"name": "chain", "stages": {"prepare": {"params": {}}}})
    assert [one["message"] for one in error.fields] == ["what has `stages` is a pipeline: send it to POST /pipelines"]

    with pytest.raises(ApiError) as typo:
        daemon.client.jobs(stage=["trian"])
    assert typo.value.fields[0]["suggestion"] == "train"


@pytest.mark.parametrize(
    ("value", "pointer"),
    [({"epochs": 0}, "epochs"), ({"lr": float("nan")}, "lr"), ({"noise": float("inf")}, "noise"),
     ({"seed": "x"}, "seed"), ({"verifier": "/a\0b"}, "verifier"), ({"device": "tpu"}, "device")],
)  # fmt: skip
def test_values_out_of_bounds(shared, value, pointer):
    daemon, _ = shared
    params = {"verifier": "/v", "data_dir": "/d", "vocab_map_dir": "/m", **value}
    token = (daemon.state / "token").read_text().strip()
    answer = httpx.post(
        daemon.client.url + "/jobs",
        content=json.dumps({"stage": "train", "params": params}),
        headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        trust_env=False,
    )
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == f"/params/{pointer}"


@pytest.mark.parametrize(
    ("change", "pointer"),
    [({"params": {"epochs": True}}, "/params/epochs"), ({"params": {"epochs": "5"}}, "/params/epochs"),
     ({"params": {"epochs": 5.0}}, "/params/epochs"), ({"params": {"lr": "1e-4"}}, "/params/lr"),
     ({"params": {"train_head": "yes"}}, "/params/train_head"), ({"params": {"train_head": 1}}, "/params/train_head"),
     ({"params": {"aux_layer_ids": [1, "2"]}}, "/params/aux_layer_ids/1"), ({"priority": "3"}, "/priority"),
     ({"priority": True}, "/priority"), ({"max_seconds": "9"}, "/max_seconds"),
     ({"resources": {"cpus": "1"}}, "/resources/cpus"), ({"retry": {"max_retries": False}}, "/retry/max_retries"),
     ({"retry": {"on": ["preemted"]}}, "/retry/on/0"), ({"resources": {"gpu": 1}}, "/resources/gpu")],
)  # fmt: skip
def test_a_value_of_another_kind_is_not_guessed_at(shared, change, pointer):
    daemon, _ = shared
    params = {"verifier": "/v", "data_dir": "/d", "vocab_map_dir": "/m", **change.pop("params", {})}
    error = refused(daemon, {"stage": "train", "params": params, **change})
    assert (error.status, [one["pointer"] for one in error.fields]) == (422, [pointer])
    suggestions = {"/retry/on/0": "preempted", "/resources/gpu": "gpus"}
    assert error.fields[0]["suggestion"] == suggestions.get(pointer)


def test_what_is_of_the_right_kind_in_json_is_taken(shared):
    daemon, planned = shared
    request = planned(max_seconds=60, resources={"ram_gib": 1}, retry={"on": ["preempted"], "backoff_s": 1})
    [job] = daemon.client.submit(request)
    assert daemon.wait_ended(job["id"])["max_seconds"] == 60.0


def test_paths_outside_the_roots(shared, tmp_path):
    daemon, planned = shared
    request = planned()
    request["params"]["checkpoint"] = "/etc"
    error = refused(daemon, request)
    assert (error.status, field(error)[0]) == (403, "/params/checkpoint")
    request["params"]["checkpoint"] = str(daemon.root / ".." / ".." / "elsewhere")
    assert refused(daemon, request).status == 403
    link = daemon.root / "link"
    link.symlink_to("/etc")
    request["params"]["checkpoint"] = str(link / "ssl")
    assert refused(daemon, request).status == 403
    request["params"]["checkpoint"] = str(daemon.state / "token")
    assert refused(daemon, request).status == 403
    link.unlink()


def test_paths_that_cannot_be_used(shared):
    daemon, planned = shared
    request = planned()
    request["params"]["checkpoint"] = str(daemon.root / "absent")
    error = refused(daemon, request)
    assert (error.status, field(error)[0]) == (422, "/params/checkpoint")
    assert "does not exist" in field(error)[1]
    request["params"]["checkpoint"] = "relative/path"
    assert "absolute" in field(refused(daemon, request))[1]
    request = planned()
    full = daemon.root / "full"
    full.mkdir()
    (full / "x").write_text("x")
    for bad in (full, daemon.root.parent, daemon.state / "jobs" / "x", daemon.root / "daemon.log"):
        request["params"]["output_dir"] = str(bad)
        error = refused(daemon, request)
        assert field(error)[0] == "/params/output_dir"


def test_an_output_directory_belongs_to_one_job(shared, tmp_path):
    daemon, planned = shared
    one, two = planned(name="one"), planned(name="two")
    one["params"]["output_dir"] = str(daemon.root / "claimed")
    two["params"]["output_dir"] = str(daemon.root / "x" / ".." / "claimed")
    error = refused(daemon, {"jobs": [one, two]})
    assert field(error)[0] == "/jobs/1/params/output_dir"
    one = planned(["until_file", str(tmp_path / "go")], name="one")
    one["params"]["output_dir"] = str(daemon.root / "claimed")
    [first] = daemon.client.submit(one)
    assert first["id"] in field(refused(daemon, two))[1]
    (tmp_path / "go").touch()
    daemon.wait_ended(first["id"])


def test_inputs_may_come_from_what_a_job_waits_for(shared):
    daemon, planned = shared
    maker, user = planned(name="maker"), planned(name="user")
    maker["params"]["output_dir"] = str(daemon.root / "made")
    user["params"]["checkpoint"] = str(daemon.root / "made" / "0")
    error = refused(daemon, {"jobs": [maker, user]})
    assert field(error)[0] == "/jobs/1/params/checkpoint"
    user["depends_on"] = ["between"]
    between = planned(name="between", depends_on=["maker"])
    stored = daemon.client.submit({"jobs": [user, between, maker]})
    assert len(stored) == 3
    assert daemon.wait_ended(stored[0]["id"])["reason"] in ("bad_input", "internal_error")


def test_dependencies_that_cannot_be(shared):
    daemon, planned = shared
    a, b, c = (
        planned(name="a", depends_on=["b"]),
        planned(name="b", depends_on=["c"]),
        planned(name="c", depends_on=["a"]),
    )
    error = refused(daemon, {"jobs": [a, b, c]})
    assert "circle" in field(error)[1]
    assert field(refused(daemon, planned(name="me", depends_on=["me"])))[0] == "/depends_on"
    error = refused(daemon, {"jobs": [planned(name="prepare"), planned(name="b", depends_on=["prepar"])]})
    assert field(error) == ("/jobs/1/depends_on/0", "there is no job 'prepar'", "prepare")
    error = refused(daemon, {"jobs": [planned(name="same"), planned(name="same")]})
    assert field(error)[0] == "/jobs/1/name"
    [one] = daemon.client.submit(planned(name="twice"))
    [stored] = daemon.client.submit(planned(name="waits", depends_on=["twice"]))
    assert daemon.wait_ended(stored["id"])["depends_on"] == [one["id"]]
    daemon.client.submit(planned(name="twice"))
    assert "2 jobs are called" in field(refused(daemon, planned(depends_on=["twice"])))[1]
    [stored] = daemon.client.submit(planned(name="by id", depends_on=[one["id"]]))
    assert daemon.wait_ended(stored["id"])["state"] == "succeeded"


def test_verifiers_and_files_that_hold_nothing(shared):
    daemon, _ = shared
    verifier = daemon.root / "verifier"
    verifier.mkdir()
    empty = daemon.root / "empty.jsonl"
    empty.write_text("\n \n")
    params = {"verifier": str(verifier), "conversations": str(empty)}
    error = refused(daemon, {"stage": "prepare", "params": params})
    assert {one["pointer"] for one in error.fields} == {"/params/verifier", "/params/conversations"}


def test_output_directories_do_not_lie_in_one_another(shared):
    daemon, planned = shared
    outer, inner = planned(name="outer"), planned(name="inner")
    outer["params"]["output_dir"] = str(daemon.root / "nest")
    inner["params"]["output_dir"] = str(daemon.root / "nest" / "sub")
    assert "lies in the output directory of outer" in field(refused(daemon, {"jobs": [outer, inner]}))[1]
    assert "holds the output directory of inner" in field(refused(daemon, {"jobs": [inner, outer]}))[1]


def test_a_chain_in_which_every_job_waits_for_all_before_it_is_accepted_at_once(shared):
    """Its paths from end to start are 2 to the power of 38."""
    daemon, planned = shared
    first = planned(["raise", "data"], name="0")
    chain = [first] + [{**first, "name": str(n), "depends_on": [str(m) for m in range(n)]} for n in range(1, 40)]
    stored = daemon.client.submit({"jobs": chain})
    assert daemon.wait_ended(stored[-1]["id"])["reason"] == "dependency_failed"


def test_paths_no_file_system_takes(shared):
    daemon, planned = shared
    (daemon.root / "circle").symlink_to("circle")
    (daemon.root / "nowhere").symlink_to(daemon.root / "not there")
    (daemon.root / "marked").mkdir()
    (daemon.root / "marked" / ".eyas-job").write_bytes(b"\xff\xfe")
    for name in ("circle", "x" * 300, "nowhere"):
        request = planned()
        request["params"]["checkpoint"] = str(daemon.root / name)
        assert field(refused(daemon, request))[0] == "/params/checkpoint"
    for name in ("circle", "x" * 300, "nowhere", "marked"):
        request = planned()
        request["params"]["output_dir"] = str(daemon.root / name)
        assert field(refused(daemon, request))[0] == "/params/output_dir"


def test_thousands_of_faults_are_counted_and_the_first_are_listed(shared):
    daemon, planned = shared
    for request in (
        {"stage": "train", "params": {f"field {n}": 1 for n in range(3000)}},
        {**planned(), **{f"field {n}": 1 for n in range(3000)}},
    ):
        error = refused(daemon, request)
        assert len(error.fields) == 50
        assert " more)" in error.problem["detail"]
    error = refused(daemon, {"stage": "x" * 100_000, "params": {}})
    assert len(error.problem["detail"]) <= 2000
