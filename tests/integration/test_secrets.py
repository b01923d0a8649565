"""A canary in environment, parameters, URL, headers and log is in no answer, log line, page or row that is shown."""

import json
import subprocess
from pathlib import Path

import httpx
import pytest

from server.app import ROUTERS
from tests.integration.conftest import worker_python

CANARY = "Canary-9f3c1e7b5a-Value"
NAMED = "Kanarienvogel-77-abc"


@pytest.fixture
def daemon(new_daemon, tmp_path):
    return new_daemon(
        **worker_python(tmp_path),
        HF_TOKEN=CANARY,
        PLAIN_NAME=NAMED,
        EYAS_SECRET_VARIABLES='["PLAIN_NAME"]',
    )


def shown(daemon, job_ids):
    """Everything a reader can get hold of: status, headers and body of every GET, and of many a refused request."""
    token = (daemon.state / "token").read_text().strip()
    answers = []
    with httpx.Client(base_url=daemon.client.url, trust_env=False, timeout=60) as http:
        good = {"Authorization": f"Bearer {token}"}
        paths = {route.path_format for router in ROUTERS for route in router.routes if "GET" in route.methods} - {
            "/login"
        }
        for path in [*sorted(paths), "/openapi.json"]:
            for job_id in [*job_ids, CANARY]:
                answers.append(
                    http.get(path.format(job_id=job_id, name=CANARY, pipeline_id=CANARY, path=CANARY), headers=good)
                )
        for job_id in job_ids:
            answers += [http.get(f"/jobs/{job_id}/log?offset={n}&limit=7", headers=good) for n in range(200)]
        json_good = {**good, "Content-Type": "application/json"}
        bodies = [
            {"stage": CANARY, "params": {}},
            {"stage": "validate", "params": {"checkpoint": f"/{CANARY}"}},
            {"stage": "validate", "params": {CANARY: 1}},
            {"stage": "validate", "name": CANARY, "params": {"checkpoint": "/"}, "depends_on": [CANARY]},
            {"stage": "external", "params": {"argv": [f"/{CANARY}", CANARY]}},
            {CANARY: CANARY, "stage": 3},
        ]
        answers += [http.post("/jobs", headers=json_good, content=json.dumps(body)) for body in bodies]
        answers += [http.post("/jobs", headers=json_good, content=f'{{"{CANARY}'.encode())]
        answers += [
            http.post("/tokens", headers=json_good, content=json.dumps({"name": f"/{CANARY}", "scope": CANARY}))
        ]
        answers += [http.delete(f"/tokens/{CANARY}", headers=good), http.put(f"/{CANARY}", headers=good)]
        for path in (
            f"/{CANARY}",
            f"/jobs/{CANARY}?x={CANARY}",
            f"/jobs?limit={CANARY}",
            f"/login?code={CANARY}",
            "/jobs",
        ):
            for headers in (
                good, {"Authorization": f"Bearer {CANARY}"}, {**good, "Host": CANARY}, {"Cookie": f"a={CANARY}"},
                {**json_good, "Idempotency-Key": CANARY}, {**good, "X-Request-Id": CANARY, "User-Agent": CANARY},
            ):  # fmt: skip
                answers.append(http.get(path, headers=headers))
        key = {**json_good, "Idempotency-Key": CANARY}
        for checkpoint in ("/a", "/b"):
            body = {"stage": "validate", "params": {"checkpoint": checkpoint}}
            answers.append(http.post("/jobs", headers=key, content=json.dumps(body)))
        answers.append(http.post("/jobs", headers={**key, "Origin": f"http://{CANARY}"}, content=b"{}"))
    return [f"{answer.status_code} {answer.headers.multi_items()}\n{answer.text}" for answer in answers]


def test_fault_24_a_canary_secret_is_shown_nowhere(daemon, planned, tmp_path):
    """It is in the environment of daemon and job, and the job prints it, reports it and fails with it."""
    ids = []
    for word in (CANARY, NAMED, f"https://me:{CANARY}@host/path"):
        folder = daemon.root / word.replace("/", "_").replace(":", "_")
        folder.mkdir()
        request = planned(
            ["print", f"line one\nmy secret is {word} and on\n"],
            ["event", {"type": "warning", "code": "odd", "message": f"saw {word}"}],
            ["fail", f"could not use {word}"],
            name=f"job {word}",
        )
        ids.append(daemon.client.submit(request)[0]["id"])
    key_of = daemon.client.submit(planned(name="keyed"), key=CANARY)[0]["id"]
    for job_id in ids:
        assert daemon.wait_ended(job_id)["state"] == "failed"
    daemon.wait_ended(key_of)
    job = daemon.client.job(ids[0])
    assert job["cause"].startswith("could not use ***")
    assert (
        daemon.attempt(ids[0]).joinpath("output.log").read_bytes().count(CANARY.encode()) >= 1
    )  # the file is as it was

    texts = shown(daemon, [*ids, key_of])
    commands = (
        "jobs --json",
        "jobs",
        f"job {ids[0]} --json",
        f"job {ids[0]}",
        f"log {ids[0]}",
        "audit --json",
        "audit",
    )
    for command in (*commands, "token list --json"):
        run = subprocess.run(
            [*daemon.command(*command.split()), "--state", str(daemon.state)],
            capture_output=True,
            timeout=60,
            check=True,
        )
        texts.append(run.stdout.decode() + run.stderr.decode())
    daemon.stop()
    texts.append((daemon.root / "daemon.log").read_text())
    assert len(texts) > 300
    for word in (CANARY, NAMED):
        assert [text[:300] for text in texts if word.lower() in text.lower()] == []


def test_fault_24_a_job_gets_its_parameters_as_they_are(daemon, planned):
    """What is overwritten in answers is true where it is used."""
    folder = daemon.root / CANARY
    folder.mkdir()
    (folder / "plan.json").write_text('[["print", "read"]]')
    [one] = daemon.client.submit({"stage": "validate", "params": {"checkpoint": str(folder)}})
    job = daemon.wait_ended(one["id"])
    assert job["state"] == "succeeded"
    assert job["params"]["checkpoint"] == str(daemon.root / ("*" * len(CANARY)))
    assert json.loads((daemon.state / "jobs" / one["id"] / "spec.json").read_text())["params"]["checkpoint"] == str(
        folder
    )


def test_a_log_without_secrets_is_served_byte_for_byte_and_one_with_keeps_its_offsets(daemon, planned):
    text = f"\xff\x00 bytes {CANARY} more {'x' * 3000} {CANARY}{CANARY} end\n"
    [one] = daemon.client.submit(planned(["print", text]))
    daemon.wait_ended(one["id"])
    raw = (daemon.attempt(one["id"]) / "output.log").read_bytes()
    expected = raw.replace(CANARY.encode(), b"*" * len(CANARY))
    for size in (1, 13, 100, 1 << 20):
        pieces, offset = [], 0
        while (part := daemon.client.log(one["id"], offset, size)).data and len(pieces) < 120:
            pieces.append(part.data)
            assert part.next_offset == offset + len(part.data)
            offset = part.next_offset
        assert b"".join(pieces) == expected[:offset]


def test_secrets_of_the_environment_reach_the_job(daemon, planned):
    """They are kept from readers, not from the work."""
    [one] = daemon.client.submit(planned(["until_stopped", None]))
    daemon.wait_state(one["id"], "running")
    process = json.loads((daemon.attempt(one["id"]) / "process.json").read_text())
    assert f"HF_TOKEN={CANARY}".encode() in Path(f"/proc/{process['stage']['pid']}/environ").read_bytes()
    daemon.client.cancel(one["id"], 0)
