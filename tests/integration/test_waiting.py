"""A request that is answered when there is something to say."""

import json
import socket
import subprocess
import threading
import time

import httpx
import psutil
import pytest

from client.http import EyasClient

PROGRESS = {"type": "progress", "step": 1, "steps": 9, "epoch": 0, "epochs": 2, "loss": 2.0}


@pytest.fixture
def http(shared):
    daemon, _ = shared
    with httpx.Client(
        base_url=daemon.client.url, headers=daemon.client._http.headers, trust_env=False, timeout=60
    ) as http:
        yield http


class Asked:
    """A request on its way, in a thread."""

    def __init__(self, http, path, **headers):
        self.answer = None
        self.seconds = None
        self._thread = threading.Thread(target=self._ask, args=(http, path, headers))
        self._thread.start()

    def _ask(self, http, path, headers):
        begin = time.monotonic()
        self.answer = http.get(path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        self.seconds = time.monotonic() - begin

    def get(self):
        self._thread.join(60)
        assert self.answer is not None
        return self.answer


@pytest.fixture
def held(shared, tmp_path, wait_for):
    """A running job that does one thing after the other, each at a word: `step(n)` lets the next one begin."""
    releases = []

    def make(*plan, **fields):
        daemon, planned = shared
        words = [["event", {"type": "phase", "phase": "here"}]]
        for number, word in enumerate(plan):
            words += [["until_file", str(tmp_path / f"go-{number}")], word]
        words += [["until_file", str(tmp_path / f"go-{len(plan)}")]]
        releases.extend(tmp_path / f"go-{number}" for number in range(len(plan) + 1))
        [stored] = daemon.client.submit(planned(*words, **fields))
        wait_for(lambda: daemon.client.job(stored["id"])["phase"] == "here")
        return stored["id"], lambda number: (tmp_path / f"go-{number}").touch()

    yield make
    for release in releases:  # a test that failed leaves nothing running in the daemon the others share
        release.touch()


def test_a_plain_conditional_get(shared, http, held):
    job_id, step = held()
    first = http.get(f"/jobs/{job_id}")
    tag = first.headers["etag"]
    assert tag.endswith(f'-{first.json()["version"]}"')
    for header in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = http.get(f"/jobs/{job_id}", headers={"If-None-Match": header})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert http.get(f"/jobs/{job_id}", headers={"If-None-Match": '"other"'}).status_code == 200
    step(0)
    daemon, _ = shared
    daemon.wait_ended(job_id)
    assert http.get(f"/jobs/{job_id}", headers={"If-None-Match": tag}).status_code == 200


def test_a_change_answers_who_waits_and_progress_does_not(http, held):
    job_id, step = held(["event", PROGRESS], ["event", {"type": "phase", "phase": "validating"}])
    tag = http.get(f"/jobs/{job_id}?wait=0").headers["etag"]
    version = http.get(f"/jobs/{job_id}").json()["version"]
    change = Asked(http, f"/jobs/{job_id}?wait=30", if_none_match=tag)
    progress = Asked(http, f"/jobs/{job_id}?wait=30&until=progress&since={version}")
    unasked = Asked(http, f"/jobs/{job_id}?wait=30m&until=change")
    step(0)
    found = progress.get()
    assert (found.status_code, found.headers["x-wait"]) == (200, "met")
    assert found.json()["epoch"] == 0
    # The first word of an epoch is a change as well; what follows within it is not.
    assert change.get().json()["epoch"] == 0
    assert unasked.get().json()["epoch"] == 0
    tag = change.get().headers["etag"]
    change = Asked(http, f"/jobs/{job_id}?wait=30", if_none_match=tag)
    step(1)
    assert change.get().json()["phase"] == "validating"
    step(2)


def test_headers_that_come_in_parts_or_in_quotes(http, held):
    job_id, _ = held()
    tag = http.get(f"/jobs/{job_id}").headers["etag"]
    parts = [("If-None-Match", '"another"'), ("If-None-Match", f"W/{tag}")]
    assert http.get(f"/jobs/{job_id}", headers=parts).status_code == 304
    assert "x-wait" not in http.get(f"/jobs/{job_id}", headers={"Prefer": 'note="a, wait=9"'}).headers
    told = http.get(f"/jobs/{job_id}", headers={"Prefer": 'note="a, \\"b", wait=0; x=1, wait=9'}).headers
    assert told["preference-applied"] == "wait=0"
    long = http.get(f"/jobs/{job_id}?since=0", headers={"Prefer": "wait=" + "9" * 30}).headers
    assert (long["x-wait"], long["x-wait-limit"]) == ("met", "1800")


def test_who_waits_for_a_job_that_is_deleted_is_told_at_once(shared, http):
    daemon, planned = shared
    stays, goes = (daemon.client.submit(planned(["until_stopped", None]))[0]["id"] for _ in range(2))
    daemon.client.cancel(goes, grace_s=0)
    daemon.wait_ended(goes)
    daemon.wait_state(stays, "running")
    of_these = Asked(http, f"/jobs?ids={stays},{goes}&wait=60&until=progress")
    of_any = Asked(http, "/jobs?wait=60", If_None_Match=http.get("/jobs").headers["etag"])
    confirm = http.delete(f"/jobs/{goes}", headers={"Content-Type": "application/json"}).json()["confirm"]
    removed = http.delete(f"/jobs/{goes}", params={"confirm": confirm})
    assert removed.json()["deleted"] is True
    assert of_these.get().status_code == 404
    assert of_any.get().status_code == 200
    assert max(of_these.seconds, of_any.seconds) < 30
    daemon.client.cancel(stays, grace_s=0)


def test_nothing_new_is_told_at_the_end_of_the_wait(http, held):
    job_id, step = held()
    first = http.get(f"/jobs/{job_id}")
    tag, version = first.headers["etag"], first.json()["version"]
    for path, headers, status in (
        (f"/jobs/{job_id}?wait=300ms", {"If-None-Match": tag}, 304),
        (f"/jobs/{job_id}", {"If-None-Match": tag, "Prefer": "respond-async, wait=0"}, 304),
        (f"/jobs/{job_id}?wait=0.3s&since={version}&until=epoch", {}, 200),
        (f"/jobs/{job_id}?wait=0.3s&since={tag.strip(chr(34))}&until=checkpoint", {}, 200),
    ):
        answer = http.get(path, headers=headers)
        assert (answer.status_code, answer.headers["x-wait"], answer.headers["etag"]) == (status, "timeout", tag), path
        assert ("preference-applied" in answer.headers) == ("Prefer" in headers)
        assert status == 304 or answer.json()["version"] == version
    step(0)


def test_what_has_occurred_since_is_answered_at_once(shared, http, held):
    daemon, _ = shared
    epoch = {"type": "epoch", "epoch": 0, "epochs": 2, "train_s": 1.0, "val_s": 1.0, "train": {}, "val": None}
    checkpoint = {"type": "checkpoint", "path": "/c/0", "epoch": 0, "step": 3, "bytes": 1}
    verdict = {"type": "verdict", "path": "/c/0", "verdict": "valid", "findings": [], "seconds": 0.1}
    job_id, step = held(
        ["event", epoch], ["event", checkpoint], ["event", verdict], ["event", {**PROGRESS, "epoch": 1}]
    )
    start = daemon.client.job(job_id)["version"]
    waiting = Asked(http, f"/jobs/{job_id}?wait=30&until=checkpoint&since={start}")
    step(0)
    after_epoch = daemon.client.wait(job_id, "epoch", start, 30).job
    assert [done["epoch"] for done in after_epoch["epochs_done"]] == [0]
    assert waiting.answer is None
    assert daemon.client.wait(job_id, "checkpoint", 0, 0.1).outcome == "timeout"  # there was none since the beginning
    step(1)
    written = waiting.get().json()
    assert written["last_checkpoint"] == {"path": "/c/0", "verdict": None, "why": None}
    step(2)
    judged = daemon.client.wait(job_id, "checkpoint", written["version"], 30)
    assert (judged.job["last_checkpoint"]["verdict"], judged.outcome) == ("valid", "met")
    # Each of them is in the past now: asked about from the start, all are answered at once.
    for until in ("epoch", "checkpoint", "change", "progress"):
        assert daemon.client.wait(job_id, until, start, 30).outcome == "met"
    assert daemon.client.wait(job_id, "epoch", judged.job["version"], 0.1).outcome == "timeout"
    step(3), step(4)


def test_an_end_answers_everybody(shared, http, held):
    daemon, _ = shared
    job_id, step = held()
    asked = [Asked(http, f"/jobs/{job_id}?wait=30&until={until}") for until in ("terminal", "epoch", "change")]
    step(0)
    for one in asked[:2]:
        answer = one.get()
        assert (answer.json()["state"], answer.headers["x-wait"]) == ("succeeded", "ended")
    asked[2].get()
    tag = http.get(f"/jobs/{job_id}").headers["etag"]
    late = Asked(http, f"/jobs/{job_id}?wait=30", if_none_match=tag)
    assert late.get().status_code == 304
    assert late.seconds < 25
    assert daemon.client.wait(job_id).outcome == "ended"


def test_validators_of_another_database_are_old(http, held):
    job_id, step = held()
    version = http.get(f"/jobs/{job_id}").json()["version"]
    for known in (f"deadbeef-{version}", "nonsense", str(version + 1000), "-5", "9" * 30):
        answer = Asked(http, f"/jobs/{job_id}?wait=30&since={known}").get()
        assert (answer.status_code, answer.headers["x-wait"]) == (200, "met"), known
    step(0)


def test_any_of_many(shared, http, held, planned, wait_for):
    daemon, _ = shared
    job_id, step = held(["event", {"type": "phase", "phase": "validating"}])
    [other] = daemon.client.submit(shared[1](name="waits", depends_on=[job_id]))

    def unchanged():
        tag = http.get("/jobs").headers["etag"]
        return http.get("/jobs", headers={"If-None-Match": tag}).status_code == 304 and tag

    tag = wait_for(unchanged)  # once the others' jobs have ended and the new one says why it waits
    path = f"/jobs?ids={other['id']},{job_id}"
    pair = http.get(path)
    assert [row["id"] for row in pair.json()["jobs"]] == [other["id"], job_id]
    assert http.get(f"{path}&wait=0.2&known={pair.headers['etag'].strip(chr(34))}").headers["x-wait"] == "timeout"
    everything = Asked(http, "/jobs?wait=30", if_none_match=tag)
    two = Asked(http, f"{path}&wait=30&until=change", if_none_match=pair.headers["etag"])
    ended = Asked(http, f"{path}&wait=30&until=terminal")
    step(0)
    assert {row["phase"] for row in two.get().json()["jobs"]} == {None, "validating"}
    assert everything.get().status_code == 200
    step(1)
    rows = {row["id"]: row["state"] for row in ended.get().json()["jobs"]}
    assert rows[job_id] == "succeeded"
    daemon.wait_ended(other["id"])
    done = http.get(f"{path}&wait=30", headers={"If-None-Match": http.get(path).headers["etag"]})
    assert (done.status_code, done.headers["x-wait"]) == (304, "ended")


@pytest.mark.parametrize(
    ("path", "pointer"),
    [
        ("/jobs/{id}?wait=soon", "?wait"),
        ("/jobs/{id}?wait=-1", "?wait"),
        ("/jobs/{id}?wait=1&until=later", "?until"),
        ("/jobs?wait=1&until=epoch", "?until"),
        ("/jobs?wait=1&until=terminal", "?ids"),
        ("/jobs?ids=" + ",".join(f"j{n}" for n in range(101)), "?ids"),
        ("/jobs?ids=", "?ids"),
        ("/jobs?ids=,,", "?ids"),
        ("/jobs/{id}/log?wait=soon", "?wait"),
        ("/jobs/{id}/log?tail=3&offset=3", "?tail"),
        ("/jobs/{id}/log?wait=1&follow=true", "?follow"),
    ],
)
def test_what_cannot_be_waited_for(shared, http, planned, path, pointer):
    daemon, plan = shared
    [stored] = daemon.client.submit(plan())
    answer = http.get(path.replace("{id}", stored["id"]))
    assert answer.status_code == 422
    assert [error["pointer"] for error in answer.json()["errors"]] == [pointer]


def test_jobs_that_are_not_there(http):
    assert http.get("/jobs/nosuchjob?wait=30").status_code == 404
    assert http.get("/jobs?ids=nosuchjob&wait=30").status_code == 404
    assert http.get("/jobs?ids=../x").status_code == 404
    for path in ("events/stream", "log/stream", "log?wait=30", "log?follow=true"):
        assert http.get(f"/jobs/nosuchjob/{path}").status_code == 404


def test_a_wait_is_cut_and_that_is_told(planned_daemon, planned):
    daemon = planned_daemon(EYAS_MAX_WAIT_S="0.3")
    [stored] = daemon.client.submit(planned(["until_stopped", None]))
    daemon.wait_state(stored["id"], "running")
    headers = daemon.client._http.headers
    with httpx.Client(base_url=daemon.client.url, headers=headers, trust_env=False, timeout=60) as http:
        answer = http.get(f"/jobs/{stored['id']}?wait=1h&until=terminal")
        assert (answer.headers["x-wait"], answer.headers["x-wait-limit"]) == ("timeout", "0.3")
        answer = http.get(f"/jobs/{stored['id']}?until=terminal", headers={"Prefer": "wait=3600"})
        assert answer.headers["preference-applied"] == "wait=0"
    assert daemon.client.wait(stored["id"], timeout_s=0.7).outcome == "timeout"


def test_the_client_waits_over_a_restart_and_the_daemon_goes_at_once(planned_daemon, planned, tmp_path, wait_for):
    daemon = planned_daemon()
    plan = [["event", {"type": "phase", "phase": "here"}], ["until_file", str(tmp_path / "go")]]
    [stored] = daemon.client.submit(planned(*plan))
    wait_for(lambda: daemon.client.job(stored["id"])["phase"] == "here")
    version = daemon.client.job(stored["id"])["version"]
    outcome = []
    with EyasClient.of_state(daemon.state) as client:
        waiting = threading.Thread(target=lambda: outcome.append(client.wait(stored["id"])))
        waiting.start()
        headers = dict(daemon.client._http.headers)
        with httpx.Client(base_url=daemon.client.url, headers=headers, trust_env=False, timeout=60) as http:
            bare = Asked(http, f"/jobs/{stored['id']}?wait=30&until=terminal")
            lists = Asked(http, f"/jobs?ids={stored['id']}&wait=30&until=terminal")
            log = Asked(http, f"/jobs/{stored['id']}/log?offset=100000&wait=30")
            assert http.get(f"/jobs/{stored['id']}?wait=0.5&until=epoch").status_code == 200  # the others are there
            begin = time.monotonic()
            daemon.stop()
            assert time.monotonic() - begin < 15
            for one in (bare, lists):
                assert one.get().status_code == 503
                assert one.get().headers["retry-after"] == "1"
                assert one.get().headers["content-type"] == "application/problem+json"
            assert log.get().content == b""
        daemon.start()
        assert daemon.client.wait(stored["id"], "change", version, 0.2).outcome == "timeout"  # a restart is none
        (tmp_path / "go").touch()
        waiting.join(60)
    [(job, how)] = outcome
    assert (job["state"], how) == ("succeeded", "ended")


def test_who_may_wait(shared, http, held):
    daemon, _ = shared
    job_id, step = held()
    token = daemon.client.create_token("news-reader", "read")["token"]
    with EyasClient(daemon.client.url, token) as reader:
        assert reader.wait(job_id, timeout_s=0.1).outcome == "timeout"
        waiting = Asked(reader._http, f"/jobs/{job_id}?wait=20&until=terminal")
        assert daemon.client.wait(job_id, timeout_s=0.3).outcome == "timeout"
        daemon.client.revoke_token("news-reader")
        step(0)
        assert waiting.get().status_code == 401
    assert httpx.get(f"{daemon.client.url}/jobs/{job_id}?wait=9", trust_env=False, timeout=60).status_code == 401


def test_many_waiters_take_no_threads_and_leave_nothing_behind(shared, held, wait_for):
    """A hundred clients wait and go away: their waits end with them, not after half an hour."""
    daemon, _ = shared
    job_id, step = held()

    def threads():
        return psutil.Process(daemon.pid).num_threads()

    def sockets():
        return len(psutil.Process(daemon.pid).net_connections("tcp"))

    before_threads, before_sockets = threads(), sockets()
    headers = f"Host: localhost\r\nAuthorization: {daemon.client._http.headers['authorization']}"
    request = f"GET /jobs/{job_id}?wait=30m HTTP/1.1\r\n{headers}\r\n\r\n"
    port = int(daemon.client.url.rpartition(":")[2])
    waiting = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    for one in waiting:
        one.sendall(request.encode())
    wait_for(lambda: sockets() >= before_sockets + 100)
    assert daemon.client.job(job_id)["state"] == "running"
    assert threads() - before_threads < 10
    for one in waiting:
        one.close()
    wait_for(lambda: sockets() <= before_sockets + 2, what="the ends of the connections")
    step(0)


def test_the_command_waits(shared, held):
    daemon, planned = shared

    def eyas(*words):
        return subprocess.run(
            [*daemon.command(*words), "--state", str(daemon.state)], capture_output=True, text=True, timeout=60
        )

    job_id, step = held()
    assert eyas("wait", job_id, "--timeout", "300ms").returncode == 124
    assert eyas("wait", job_id, "--timeout", "soon").returncode == 125
    waiting = subprocess.Popen(
        [*daemon.command("job", job_id, "--wait", "--json"), "--state", str(daemon.state)], stdout=subprocess.PIPE
    )
    step(0)
    done = eyas("wait", job_id)
    assert (done.returncode, "succeeded" in done.stdout) == (0, True)
    assert json.loads(waiting.communicate(timeout=60)[0])["id"] == job_id
    [failing] = daemon.client.submit(planned(["raise", "data"]))
    failed = eyas("wait", failing["id"], "--json")
    assert (failed.returncode, json.loads(failed.stdout)["reason"]) == (1, "bad_data")
    assert eyas("wait", failing["id"], "--until", "epoch").returncode == 1
