"""Finding jobs again: filters, labels, pages; and the numbers over all of them."""

import json

import httpx
import pytest

from client.http import ApiError


def get(daemon, path, **headers):
    token = (daemon.state / "token").read_text().strip()
    return httpx.get(
        daemon.client.url + path, headers={"Authorization": f"Bearer {token}", **headers}, trust_env=False, timeout=60
    )


@pytest.fixture(scope="module")
def stored(shared):
    """Twelve jobs: every third failed, two models, two names."""
    daemon, planned = shared
    ids = []
    for number in range(12):
        plan = [["raise", "data"]] if number % 3 == 0 else []
        labels = {"model": "kimi" if number % 2 else "qwen", "run": str(number)} | ({"best": ""} if number == 7 else {})
        [job] = daemon.client.submit(planned(*plan, name=f"job {number // 6}", labels=labels))
        ids.append(job["id"])
    for job_id in ids:
        daemon.wait_ended(job_id)
    return daemon, ids


def found(daemon, **wanted):
    return [job["id"] for job in daemon.client.jobs(100, **wanted)]


def test_each_filter_finds_what_it_names(stored):
    daemon, ids = stored
    newest = ids[::-1]
    assert found(daemon) == newest
    assert found(daemon, state=["failed"]) == [ids[9], ids[6], ids[3], ids[0]]
    assert found(daemon, state=["failed", "succeeded"]) == newest
    assert found(daemon, state=["running"]) == []
    assert found(daemon, stage=["validate"]) == newest
    assert found(daemon, stage=["train", "extract"]) == []
    assert found(daemon, name=["job 1"]) == newest[:6]
    assert found(daemon, label=["model=kimi"]) == [one for one in newest if ids.index(one) % 2]
    assert found(daemon, label=["model=kimi", "model=qwen"]) == newest
    assert found(daemon, label=["model=kimi", "run=4"]) == []
    assert found(daemon, label=["best"]) == found(daemon, label=["best="]) == [ids[7]]
    assert found(daemon, label=["best", "run=7"], state=["succeeded"], name=["job 1"]) == [ids[7]]
    third = daemon.client.job(ids[3])["created_at"]
    assert found(daemon, since=third) == newest[:9]
    assert found(daemon, since="2100-01-01T00:00:00Z") == []


def test_pages_are_whole_while_jobs_come_in(shared, stored):
    daemon, ids = stored
    _, planned = shared
    seen, cursor, late = [], None, []
    while True:
        page = daemon.client.job_page(5, cursor, name=["job 0", "job 1"])
        seen += [job["id"] for job in page["jobs"]]
        late += daemon.client.submit(planned(name="comes in"))
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == ids[::-1]
    assert len(late) == 3
    for job in late:
        daemon.wait_ended(job["id"])


def test_what_no_filter_can_be_is_said(stored):
    daemon, _ = stored
    for query, pointer, hint in (
        ("state=runing", "?state/0", "running"),
        ("stat=running", "?stat", "state"),
        ("cursor=MTI", "?cursor", None),
        ("cursor=%00", "?cursor", None),
        ("since=yesterday", "?since", None),
        ("since=0001-01-01T00:00:00%2B23:59", "?since", None),
        ("limit=0", "?limit", None),
        ("limit=1&limit=2", "?limit", None),
    ):
        answer = get(daemon, f"/jobs?{query}")
        assert answer.status_code == 422, query
        [error] = answer.json()["errors"]
        assert (error["pointer"], error["suggestion"]) == (pointer, hint), answer.text


def test_labels_are_shown_kept_and_bounded(stored, shared):
    daemon, ids = stored
    _, planned = shared
    job = daemon.client.job(ids[7])
    assert job["labels"] == {"best": "", "model": "kimi", "run": "7"}
    record = json.loads((daemon.state / "jobs" / ids[7] / "record.json").read_text())
    assert record["labels"] == job["labels"]
    for labels, pointer in (
        ({"a b": "x"}, "/labels/a b/[key]"),
        ({"a": "x\ny"}, "/labels/a"),
        ({"a": 1}, "/labels/a"),
        ({"a": "x" * 201}, "/labels/a"),
        ({str(number): "" for number in range(33)}, "/labels"),
    ):
        with pytest.raises(ApiError) as refused:
            daemon.client.submit(planned(labels=labels))
        assert refused.value.fields[0]["pointer"] == pointer


def test_numbers_over_all_jobs(stored):
    daemon, _ = stored
    stats = daemon.client.stats(1)
    assert stats["jobs"]["failed"] == 4
    assert set(stats["jobs"]) == {
        "queued", "starting", "running", "stopping", "paused", "succeeded", "failed", "cancelled"
    }  # fmt: skip
    assert stats["ended"]["failed"] == 4
    assert stats["reasons"] == {"bad_data": 4}
    assert (stats["queue_length"], stats["oldest_queued_s"], stats["gpu_hours"]) == (0, None, 0)
    text = get(daemon, "/metrics")
    assert text.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'eyas_jobs{state="failed"} 4.0' in text.text
    assert 'eyas_attempts_unsuccessful{reason="bad_data"} 4.0' in text.text
    assert get(daemon, "/version").json()["version"] == daemon.client.health()["version"]
    assert get(daemon, "/readyz").json() == {"ready": True, "problems": []}


def test_progress_of_what_runs_is_among_the_metrics(shared, tmp_path, wait_for):
    daemon, planned = shared
    [job] = daemon.client.submit(planned(["stream", str(tmp_path / "go")], name='odd "name"\n'.strip()))
    line = f'eyas_job_step{{job="{job["id"]}",name="odd \\"name\\"",stage="validate"}}'
    wait_for(lambda: line in get(daemon, "/metrics").text, what="its step among the metrics")
    (tmp_path / "go").touch()
    daemon.wait_ended(job["id"])
    assert line not in get(daemon, "/metrics").text


def test_a_full_disk_is_not_ready(planned_daemon):
    daemon = planned_daemon(EYAS_DISK_LOW_GB="1000000")
    answer = get(daemon, "/readyz")
    assert answer.status_code == 503
    assert "EYAS_DISK_LOW_GB" in answer.json()["problems"][0]


def test_gpu_hours_are_counted(gpu_daemon, planned, tmp_path, wait_for):
    daemon = gpu_daemon()
    request = planned(["until_file", str(tmp_path / "go")], resources={"gpus": 2})
    [job] = daemon.client.submit(request)
    daemon.wait_state(job["id"], "running")
    wait_for(lambda: daemon.client.stats()["gpu_hours"] > 0.0001, what="two GPUs for a fifth of a second")
    (tmp_path / "go").touch()
    daemon.wait_ended(job["id"])
    assert 'eyas_gpu_memory_total_bytes{gpu="0"' in get(daemon, "/metrics").text


def test_a_request_has_a_name_that_its_answer_and_the_log_carry(stored):
    daemon, _ = stored
    answer = get(daemon, "/jobs/nothing", **{"X-Request-ID": "deploy-17.a"})
    assert answer.headers["x-request-id"] == answer.json()["request_id"] == "deploy-17.a"
    for bad in ("x" * 65, "a b", "../x", "<b>"):
        answer = get(daemon, "/healthz", **{"X-Request-ID": bad})
        assert answer.headers["x-request-id"] != bad
        assert len(answer.headers["x-request-id"]) == 16
    token = {"Authorization": f"Bearer {(daemon.state / 'token').read_text().strip()}"}
    for method, path, status, kind in (
        ("GET", "/nowhere", 404, "not-found"),
        ("DELETE", "/jobs", 405, "method-not-allowed"),
        ("PATCH", "/gpus", 405, "method-not-allowed"),
        ("POST", "/jobs", 422, "invalid-request"),
    ):
        answer = httpx.request(method, daemon.client.url + path, headers=token, trust_env=False)
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["type"] == f"urn:eyas:problem:{kind}"
        assert answer.json()["request_id"] == answer.headers["x-request-id"]
