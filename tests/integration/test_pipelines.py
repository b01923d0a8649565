"""A whole chain as one document: references, defaults, its state, and its end."""

import json
import subprocess
import threading
from pathlib import Path

import httpx
import pytest
import yaml

from client.http import ApiError
from eagle3_core.contract.params import STAGES
from server.services.documents import read_yaml
from server.services.requests import PipelineRequest

ROOT = Path(__file__).parents[2]


def document(planned, *plans, **fields):
    """first -> second -> ..., each reading where the one before it wrote."""
    stages = {}
    for number, plan in enumerate(plans):
        stages[f"s{number}"] = {"stage": "validate", "params": planned(*plan)["params"]}
        if number:
            stages[f"s{number}"]["params"]["previous"] = f"${{s{number - 1}.output_dir}}"
    return {"name": "chain", "stages": stages, "defaults": {"retry": {"max_retries": 0}}, **fields}


def refused(daemon, body):
    before = daemon.client.pipelines()
    with pytest.raises(ApiError) as error:
        daemon.client.submit_pipeline(body)
    assert daemon.client.pipelines() == before
    return error.value


def ended(daemon, wait_for, pipeline_id):
    def look():
        found = daemon.client.pipeline(pipeline_id)
        return found if found["ended_at"] is not None else None

    return wait_for(look, what="the end of the pipeline")


def test_a_document_becomes_jobs_that_wait_for_one_another(shared, tmp_path, wait_for):
    daemon, planned = shared
    go = str(tmp_path / "go")
    body = document(planned, [["until_file", go]], [["print", "x"]], [], labels={"model": "kimi"})
    body["stages"]["s1"]["params"]["output_dir"] = str(daemon.root / "second")
    body["stages"]["s2"]["labels"] = {"last": "yes"}
    made = daemon.client.submit_pipeline(body)
    first, second, third = made["jobs"]
    assert [job["name"] for job in made["jobs"]] == ["s0", "s1", "s2"]
    assert [job["pipeline"] for job in made["jobs"]] == [{"id": made["id"], "name": "chain"}] * 3
    assert third["labels"] == {"last": "yes", "model": "kimi"}
    assert daemon.client.job(second["id"])["depends_on"] == [first["id"]]
    artifacts = str(daemon.state / "jobs" / first["id"] / "artifacts")
    assert daemon.client.job(second["id"])["params"]["previous"] == artifacts
    assert daemon.client.job(third["id"])["params"]["previous"] == str(daemon.root / "second")
    daemon.wait_state(first["id"], "running")
    running = daemon.client.pipeline(made["id"])
    assert (running["state"], running["jobs_total"], running["jobs_done"]) == ("running", 3, 0)
    assert "s0: running" in running["summary"]
    assert [job["id"] for job in daemon.client.jobs(pipeline=made["id"])] == [third["id"], second["id"], first["id"]]
    (tmp_path / "go").touch()
    done = ended(daemon, wait_for, made["id"])
    assert (done["state"], done["jobs_done"]) == ("succeeded", 3)
    assert done["created_at"] <= done["started_at"] <= done["ended_at"]


def test_yaml_means_what_json_means(shared, wait_for):
    daemon, planned = shared
    body = document(planned, [], [])
    body["defaults"]["retry"] = {"max_retries": 1, "on": ["bad_data"], "backoff_s": 1e-1}
    made = daemon.client.submit_pipeline(yaml.safe_dump(body, sort_keys=False).encode(), key="as yaml")
    again = daemon.client.submit_pipeline(body, key="as yaml")
    assert again["id"] == made["id"]
    with pytest.raises(ApiError) as error:
        daemon.client.submit_pipeline({**body, "name": "other"}, key="as yaml")
    assert error.value.problem["type"].endswith("idempotency-key-reused")
    done = ended(daemon, wait_for, made["id"])
    assert done["state"] == "succeeded"
    assert daemon.client.job(done["jobs"][0]["id"])["retry"] == {
        "max_retries": 1, "on": ["bad_data"], "backoff_s": 0.1
    }  # fmt: skip


def test_faults_are_told_where_they_stand(shared):
    daemon, planned = shared
    body = document(planned, [], [])

    def fault(change):
        changed = json.loads(json.dumps(body))
        change(changed)
        error = refused(daemon, changed)
        assert error.status == 422
        return error.fields[0]["pointer"], error.fields[0]["message"], error.fields[0]["suggestion"]

    def previous(text):
        return lambda doc: doc["stages"]["s1"]["params"].update(previous=text)

    pointer, message, near = fault(previous("${s9.output_dir}"))
    assert (pointer, near) == ("/stages/s1/params/previous", None)
    assert "no stage 's9'" in message
    assert fault(previous("${s0.outputdir}"))[0] == "/stages/s1/params/previous"
    assert "output_dir" in fault(previous("${s0}"))[1]
    assert "refers to itself" in fault(previous("${s1.output_dir}"))[1]
    assert fault(previous("${s0.output_dir"))[0] == "/stages/s1/params/previous"
    pointer, _, near = fault(lambda doc: doc["stages"]["s1"].update(parms={}))
    assert (pointer, near) == ("/stages/s1/parms", "params")
    pointer, _, near = fault(lambda doc: doc["stages"]["s1"]["params"].update(chekpoint="/x"))
    assert (pointer, near) == ("/stages/s1/params/chekpoint", "checkpoint")
    pointer, _, near = fault(lambda doc: doc["defaults"].update(params={"verifyer": "/x"}))
    assert (pointer, near) == ("/defaults/params/verifyer", "verifier")
    pointer, _, near = fault(lambda doc: doc["defaults"].update(retry={"max_retry": 1}))
    assert (pointer, near) == ("/defaults/retry/max_retry", "max_retries")
    assert fault(lambda doc: doc["stages"]["s1"].update(stage="vaildate"))[2] == "validate"
    assert fault(lambda doc: doc.update(stages={"a/b": {"stage": "validate"}}))[0] == "/stages/a~1b/[key]"
    pointer, message, _ = fault(
        lambda doc: [
            doc["stages"]["s0"]["params"].update(output_dir="${s1.output_dir}/x"),
            doc["stages"]["s1"]["params"].update(output_dir="${s0.output_dir}/y"),
        ]
    )
    assert "circle" in message
    assert "circle" in fault(lambda doc: doc["stages"]["s0"].update(depends_on=["s1"]))[1]


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        (b"name: [", 400, "(line "),
        (b"\xff", 400, "not UTF-8"),
        (b"a: 1\na: 2", 400, "'a' comes twice (line 2)"),
        (b"a: &x {}\nb: *x", 400, "alias"),
        (b"!!python/object/apply:os.system [id]", 400, "tag"),
        (b"a: !!binary aGk=", 400, "binary"),
        (b"[" * 100_000, 400, "not YAML"),
        (b"# nothing", 422, "dictionary"),
        (b"x: " + b"y" * 300_000, 400, "bytes"),
    ],
)
def test_what_is_no_document_is_refused(shared, text, status, words):
    daemon, _ = shared
    error = refused(daemon, text)
    assert error.status == status
    assert words in str(error.problem)


@pytest.mark.parametrize("depth", [100, 400, 700, 950, 5000])
@pytest.mark.parametrize("path", ["/pipelines", "/jobs"])
def test_nothing_is_nested_too_deeply_for_an_answer(shared, depth, path):
    daemon, _ = shared
    token = (daemon.state / "token").read_text().strip()
    deep = "[" * depth + "]" * depth
    job = f'{{"stage": "validate", "params": {{"checkpoint": {deep}}}}}'
    body = job if path == "/jobs" else f'{{"name": "deep", "stages": {{"a": {job}}}}}'
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json", "Idempotency-Key": f"{depth}"}
    answer = httpx.post(daemon.client.url + path, content=body, headers=headers, trust_env=False, timeout=60)
    assert answer.status_code in (400, 422), answer.text


def test_yaml_opens_no_door_for_other_origins(shared):
    daemon, _ = shared
    token = (daemon.state / "token").read_text().strip()
    for path, kind, status in (
        ("/pipelines", "text/plain", 415),
        ("/pipelines", "application/x-www-form-urlencoded", 415),
        ("/jobs", "application/yaml", 415),
        ("/pipelines", "application/yaml", 422),
    ):
        headers = {"Authorization": f"Bearer {token}", "Content-Type": kind}
        answer = httpx.post(daemon.client.url + path, content=b"name: x", headers=headers, trust_env=False, timeout=60)
        assert answer.status_code == status, (path, kind)
        foreign = {**headers, "Sec-Fetch-Site": "cross-site"}
        answer = httpx.post(daemon.client.url + path, content=b"name: x", headers=foreign, trust_env=False, timeout=60)
        assert answer.status_code == 403


def test_cancelling_stops_what_runs_and_what_waits(shared, wait_for):
    daemon, planned = shared
    made = daemon.client.submit_pipeline(document(planned, [["until_stopped", None]], [], []))
    daemon.wait_state(made["jobs"][0]["id"], "running")
    daemon.client.cancel_pipeline(made["id"])
    done = ended(daemon, wait_for, made["id"])
    assert done["state"] == "cancelled"
    assert [job["state"] for job in done["jobs"]] == ["cancelled"] * 3
    with pytest.raises(ApiError) as error:
        daemon.client.pipeline("nothing")
    assert error.value.status == 404


def test_a_failure_is_the_pipelines_and_a_rebuild_brings_all_back(planned_daemon, planned, wait_for):
    daemon = planned_daemon()
    made = daemon.client.submit_pipeline(document(planned, [["raise", "data"]], [], labels={"a": "b"}))
    other = daemon.client.submit_pipeline(document(planned, []))
    done = ended(daemon, wait_for, made["id"])
    ended(daemon, wait_for, other["id"])
    assert done["state"] == "failed"
    assert "bad_data" in done["summary"]
    assert [job["reason"] for job in done["jobs"]] == ["bad_data", "dependency_failed"]
    listed = daemon.client.pipelines(1)
    assert [one["id"] for one in listed["pipelines"]] == [other["id"]]
    rest = daemon.client.pipelines(1, listed["next_cursor"])
    assert ([one["id"] for one in rest["pipelines"]], rest["next_cursor"]) == ([made["id"]], None)
    assert daemon.stop() == 0
    subprocess.run(daemon.command("rebuild", "--state", str(daemon.state)), check=True, capture_output=True)
    daemon.start()
    again = daemon.client.pipeline(made["id"])
    assert again == done
    assert [job["id"] for job in daemon.client.jobs(label=["a=b"])] == [job["id"] for job in reversed(done["jobs"])]


def test_twins_at_the_same_moment_are_one_pipeline(shared, wait_for):
    daemon, planned = shared
    body = document(planned, [], [])
    gate, found = threading.Barrier(4), []

    def ask():
        client = type(daemon.client).of_state(daemon.state)
        with client:
            gate.wait()
            found.append(client.submit_pipeline(body, key="twin pipelines")["id"])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    ended(daemon, wait_for, found[0])


def test_an_external_stage_needs_the_scope_for_it(shared):
    daemon, _ = shared
    token = daemon.client.create_token("pipes", "submit")["token"]
    body = {"name": "x", "stages": {"run": {"stage": "external", "params": {"argv": ["/bin/true"]}}}}
    answer = httpx.post(
        f"{daemon.client.url}/pipelines", json=body, headers={"Authorization": f"Bearer {token}"}, trust_env=False
    )
    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (403, "/stages/run/stage")


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_is_a_pipeline(path):
    request = PipelineRequest.model_validate(read_yaml(path.read_bytes()))
    for name, stage in request.stages.items():
        kind = STAGES[stage.stage or name]
        common = {key: value for key, value in request.defaults.params.items() if key in kind.model_fields}
        kind.model_validate({**common, **stage.params})
