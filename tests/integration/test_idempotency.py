"""A request that is sent twice is carried out once."""

import json
import threading

import pytest

from client.http import ApiError, EyasClient


def submit(daemon, request, key):
    return daemon.client._send("POST", "/jobs", request, {"Idempotency-Key": key})


def test_fault_05_the_same_key_and_body_store_one_job(shared):
    daemon, planned = shared
    request = planned(["print", "x"])
    request["params"]["output_dir"] = str(daemon.root / "once")
    first, again = submit(daemon, request, "once"), submit(daemon, dict(reversed(request.items())), "once")
    assert (first.status_code, again.status_code) == (201, 200)
    assert [job["id"] for job in first.json()["jobs"]] == [job["id"] for job in again.json()["jobs"]]
    job_id = first.json()["jobs"][0]["id"]
    assert again.headers["location"] == f"/jobs/{job_id}"
    daemon.wait_ended(job_id)
    late = submit(daemon, request, "once")
    assert (late.status_code, late.json()["jobs"][0]["state"]) == (200, "succeeded")
    record = json.loads((daemon.state / "jobs" / job_id / "record.json").read_text())
    assert (record["idempotency_key"], len(record["body_hash"])) == ("once", 64)


def test_two_keys_are_none(shared):
    daemon, planned = shared
    keys = [("Idempotency-Key", "one"), ("Idempotency-Key", "two")]
    answer = daemon.client._http.post("/jobs", json=planned(), headers=keys)
    assert (answer.status_code, answer.json()["detail"]) == (400, "idempotency-key is sent more than once")


def test_the_key_with_another_body_is_refused(shared):
    daemon, planned = shared
    request = planned(name="kept")
    [stored] = daemon.client.submit(request, key="a key")
    with pytest.raises(ApiError) as refused:
        daemon.client.submit({**request, "name": "changed"}, key="a key")
    assert refused.value.status == 422
    assert refused.value.problem["type"] == "urn:eyas:problem:idempotency-key-reused"
    assert stored["id"] in refused.value.problem["detail"]
    assert daemon.client.submit(request, key="another")[0]["id"] != stored["id"]


def test_a_chain_comes_back_whole_and_in_order(shared):
    daemon, planned = shared
    chain = {"jobs": [planned(name="last", depends_on=["begin"]), planned(name="begin")]}
    first = daemon.client.submit(chain, key="chain")
    assert [job["id"] for job in daemon.client.submit(chain, key="chain")] == [job["id"] for job in first]
    assert [job["name"] for job in first] == ["last", "begin"]


def test_at_the_same_moment(shared):
    """Twins, of which each would make the checks of the other fail: one is stored, the others hear of it or wait."""
    daemon, planned = shared
    request = planned()
    request["params"]["output_dir"] = str(daemon.root / "twins")
    answers = []
    gate = threading.Barrier(6)

    def ask():
        gate.wait()
        try:
            answers.append(submit(daemon, request, "twins").status_code)
        except ApiError as error:
            answers.append((error.status, error.problem["type"]))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers.count(201) == 1
    assert set(answers) <= {200, 201, (409, "urn:eyas:problem:request-in-flight")}
    later = submit(daemon, request, "twins")
    assert later.status_code == 200


def test_the_client_asks_again_while_its_request_is_carried_out(shared):
    daemon, planned = shared
    request = planned()
    request["params"]["output_dir"] = str(daemon.root / "many")
    gate = threading.Barrier(6)
    found = []

    def ask():
        with EyasClient.of_state(daemon.state) as client:
            gate.wait()
            found.append(client.submit(request, key="many")[0]["id"])

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert len(set(found)) == 1


def test_it_outlives_the_daemon(planned_daemon, planned):
    daemon = planned_daemon()
    request = planned()
    [stored] = daemon.client.submit(request, key="kept")
    daemon.kill()
    daemon.start()
    assert daemon.client.submit(request, key="kept")[0]["id"] == stored["id"]


def test_a_refused_request_does_not_use_the_key_up(shared):
    daemon, planned = shared
    request = planned()
    with pytest.raises(ApiError):
        daemon.client.submit({**request, "stage": "valdate"}, key="again")
    assert daemon.client.submit(request, key="again")


@pytest.mark.parametrize("key", ["", "x" * 201, "tab\there"])
def test_keys_that_cannot_be(shared, key):
    daemon, planned = shared
    with pytest.raises(ApiError) as refused:
        daemon.client.submit(planned(), key=key)
    assert refused.value.status == 422
