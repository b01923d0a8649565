"""Streams of events and logs: everything once and in order, over links that break and for clients that do not read."""

import json
import socket
import subprocess
import threading
import time

import httpx
import psutil
import pytest

from client.following import parse_stream
from client.http import EyasClient
from tests.integration.flaky import flaky_link


def events_of(http, path, last_id=None):
    """A stream to its end: its events, and the answer."""
    headers = {} if last_id is None else {"Last-Event-ID": last_id}
    with http.stream("GET", path, headers=headers, timeout=60) as answer:
        return list(parse_stream(answer.iter_raw())), answer


@pytest.fixture
def http(shared):
    daemon, _ = shared
    with httpx.Client(
        base_url=daemon.client.url, headers=daemon.client._http.headers, trust_env=False, timeout=60
    ) as http:
        yield http


@pytest.fixture
def ended(shared):
    """A job that has ended, with a few events and lines, and some that are hard to put into a stream."""
    daemon, planned = shared
    words = [
        "plain",
        "two\nlines",
        "cr\rcrlf\r\nend",
        "\n\n",
        "data: id: event:",
        "\u2028\x85 ünï 😀",
        "event: end\n\n",
    ]
    plan = [["event", {"type": "warning", "code": f"w{n}", "message": word}] for n, word in enumerate(words)]
    [stored] = daemon.client.submit(planned(*plan, *(["print", word] for word in words)))
    daemon.wait_ended(stored["id"])
    return stored["id"]


def test_fault_25_each_event_once_and_replay_behind_the_last_id(shared, http, ended):
    daemon, _ = shared
    stored = daemon.file_events(ended)
    found, answer = events_of(http, f"/jobs/{ended}/events/stream")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")
    assert [json.loads(one.data) for one in found[:-1]] == stored
    assert (found[-1].event, json.loads(found[-1].data)) == ("end", {"state": "succeeded"})
    for place in (0, 3, len(stored) - 1):
        again, _ = events_of(http, f"/jobs/{ended}/events/stream", found[place].id)
        assert again == found[place + 1 :]
        by_query, _ = events_of(http, f"/jobs/{ended}/events/stream?last_event_id={found[place].id}")
        assert by_query == again
    over, answer = events_of(http, f"/jobs/{ended}/events/stream", found[-1].id)
    assert (over, answer.status_code) == ([], 204)
    behind, _ = events_of(http, f"/jobs/{ended}/events/stream?after=4")
    assert [json.loads(one.data)["seq"] for one in behind[:-1]] == list(range(5, len(stored) + 1))
    assert list(daemon.client.stream_events(ended, after=4)) == stored[4:]


def test_fault_25_an_id_of_another_database_is_noticed(shared, http, ended):
    daemon, _ = shared
    count = len(daemon.file_events(ended))
    for strange in ("deadbeef-3", "nonsense", "deadbeef-3.end", "x" * 5000):
        found, _ = events_of(http, f"/jobs/{ended}/events/stream", strange)
        assert [one.event for one in found] == ["reset", *[""] * count, "end"]
    for strange in ("9-3", "x", "1-99999999"):
        found, _ = events_of(http, f"/jobs/{ended}/log/stream", strange)
        assert [found[0].event, found[-1].event] == ["reset", "end"]
        assert json.loads(found[1].data)["text"].startswith("== importing")


def test_a_database_that_was_made_anew_or_put_back_is_another_one(planned_daemon, planned, tmp_path):
    daemon = planned_daemon()
    [stored] = daemon.client.submit(planned())
    daemon.wait_ended(stored["id"])
    path = f"/jobs/{stored['id']}"

    def look():
        with httpx.Client(
            base_url=daemon.client.url, headers=daemon.client._http.headers, trust_env=False, timeout=60
        ) as http:
            found, _ = events_of(http, f"{path}/events/stream")
            return http.get(path).headers["etag"], found[-2].id

    def incarnation(tag):
        return tag.strip('"').split("-")[0]

    first = look()
    daemon.stop()
    daemon.start()
    assert look() == first
    subprocess.run(daemon.command("backup", str(tmp_path / "backup"), "--state", str(daemon.state)), check=True)
    daemon.stop()
    subprocess.run(daemon.command("rebuild", "--state", str(daemon.state)), check=True, capture_output=True)
    daemon.start()
    rebuilt = look()
    daemon.stop()
    (daemon.state / "eyas.db").unlink()
    (tmp_path / "backup" / "eyas.db").rename(daemon.state / "eyas.db")
    for end in ("-wal", "-shm"):
        (daemon.state / f"eyas.db{end}").unlink(missing_ok=True)
    daemon.start()
    assert len({incarnation(tag) for tag, _ in (first, rebuilt, look())}) == 3
    assert incarnation(rebuilt[1]) == incarnation(rebuilt[0])


def test_log_text_is_exact_and_resumed_by_its_id(shared, http, ended):
    daemon, _ = shared
    raw = (daemon.attempt(ended) / "output.log").read_bytes()
    found, _ = events_of(http, f"/jobs/{ended}/log/stream")
    assert "".join(json.loads(one.data)["text"] for one in found[:-1]) == raw.decode()
    assert found[-2].id == f"1-{len(raw)}"
    rest, _ = events_of(http, f"/jobs/{ended}/log/stream", "1-20")
    assert "".join(json.loads(one.data)["text"] for one in rest[:-1]) == raw[20:].decode()
    assert events_of(http, f"/jobs/{ended}/log/stream", found[-1].id)[1].status_code == 204
    last, _ = events_of(http, f"/jobs/{ended}/log/stream?tail=1&view=clean")
    assert [json.loads(one.data)["text"] for one in last[:-1]] == ["\n"]


def test_a_character_that_is_cut_waits_for_its_rest(shared, http, ended):
    daemon, _ = shared
    raw = ("x" * 65_535 + "é" + "y" * 65_534 + "😀").encode() + b"\xff\xf0\x9f"
    (daemon.attempt(ended) / "output.log").write_bytes(raw)
    found, _ = events_of(http, f"/jobs/{ended}/log/stream")
    assert "".join(json.loads(one.data)["text"] for one in found[:-1]) == raw.decode(errors="replace")
    for one in found[:-2]:
        place = json.loads(one.data)["next_offset"]
        assert one.id == f"1-{place}"
        rest, _ = events_of(http, f"/jobs/{ended}/log/stream", one.id)
        assert "".join(json.loads(two.data)["text"] for two in rest[:-1]) == raw[place:].decode(errors="replace")


def test_heartbeats_while_there_is_nothing_to_say_and_the_end_of_a_token(planned_daemon, planned, tmp_path):
    daemon = planned_daemon(EYAS_HEARTBEAT_S="0.1")
    [stored] = daemon.client.submit(planned(["until_file", str(tmp_path / "go")]))
    daemon.wait_state(stored["id"], "running")
    token = daemon.client.create_token("reader", "read")["token"]
    with httpx.Client(
        base_url=daemon.client.url, headers={"Authorization": f"Bearer {token}"}, trust_env=False
    ) as http:
        for path in ("events/stream", "log/stream", "log?follow=true"):
            with http.stream("GET", f"/jobs/{stored['id']}/{path}", timeout=60) as answer:
                pieces = answer.iter_raw()
                if path.endswith("stream"):
                    beats = 0
                    while beats < 3:
                        beats += next(pieces).count(b": ping\n\n")
                else:
                    next(pieces)
                if path == "log?follow=true":
                    daemon.client.revoke_token("reader")
                    assert b"bye" not in b"".join(pieces)
    (tmp_path / "go").touch()
    daemon.wait_ended(stored["id"])


def test_streams_over_a_restart_of_the_daemon(planned_daemon, planned, tmp_path):
    daemon = planned_daemon()
    go = tmp_path / "go"
    plan = [["print", "before ünï"], ["event", {"type": "phase", "phase": "one"}], ["until_file", str(go)]]
    plan += [["print", "after"], ["event", {"type": "phase", "phase": "two"}]]
    [stored] = daemon.client.submit(planned(*plan))
    daemon.wait_state(stored["id"], "running")
    got = {"events": [], "log": []}
    with EyasClient.of_state(daemon.state) as one, EyasClient.of_state(daemon.state) as two:
        threads = [
            threading.Thread(target=lambda: got["events"].extend(one.stream_events(stored["id"]))),
            threading.Thread(target=lambda: got["log"].extend(two.follow_log(stored["id"]))),
        ]
        for thread in threads:
            thread.start()
        daemon.kill()
        daemon.start()
        daemon.stop()
        daemon.start()
        go.touch()
        for thread in threads:
            thread.join(60)
    assert got["events"] == daemon.file_events(stored["id"])
    assert b"".join(got["log"]) == (daemon.attempt(stored["id"]) / "output.log").read_bytes()


def test_fault_25_a_client_that_never_reads(planned_daemon, planned, tmp_path, wait_for):
    """Ten clients ask for streams of a job that tells and prints megabytes, and take nothing: nobody else notices, the
    daemon's memory stays as it is, and their connections are closed.
    """
    daemon = planned_daemon(EYAS_UNREAD_S="2")
    text = "x" * 100_000
    plan = [["event", {"type": "warning", "code": "long", "message": text}] for _ in range(100)]
    plan += [["print", text] for _ in range(100)]
    [stored] = daemon.client.submit(planned(*plan, ["until_file", str(tmp_path / "go")]))
    wait_for(lambda: daemon.client.log(stored["id"], limit=0).size > 9_000_000)
    list(daemon.client.events(stored["id"]))
    process = psutil.Process(daemon.pid)
    port = int(daemon.client.url.rpartition(":")[2])
    open_before = len(process.net_connections())
    before = process.memory_info().rss
    paths = ("events/stream", "log/stream", "log?follow=true", "log/stream?view=clean", "log?limit=8000000")
    clients = []
    for path in paths * 2:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        headers = f"Host: localhost\r\nAuthorization: {daemon.client._http.headers['authorization']}"
        client.sendall(f"GET /jobs/{stored['id']}/{path} HTTP/1.1\r\n{headers}\r\n\r\n".encode())
        clients.append(client)
    wait_for(lambda: len(process.net_connections()) >= open_before + len(clients))
    slowest, end = 0.0, time.monotonic() + 30
    while len(process.net_connections()) > open_before:
        begin = time.monotonic()
        assert daemon.client.job(stored["id"])["state"] == "running"
        slowest = max(slowest, time.monotonic() - begin)
        assert begin < end, "connections that take nothing stay open"
    assert slowest < 2
    assert (process.memory_info().rss - before) / 1e6 < 40
    for client in clients:
        client.close()
    (tmp_path / "go").touch()
    assert daemon.wait_ended(stored["id"])["state"] == "succeeded"


@pytest.mark.parametrize(("count", "followed"), [(40, 5), pytest.param(500, 20, marks=pytest.mark.slow)])
def test_a_link_that_loses_every_third_answer(planned_daemon, planned, tmp_path, count, followed):
    """Jobs are submitted and some of them followed over it: each job once, each event and byte once and in order."""
    daemon = planned_daemon(EYAS_MAX_RUNNING="8")
    go = tmp_path / "go"
    ids, got = [], {}
    with flaky_link(daemon.client.url) as link:
        headers = daemon.client._http.headers["authorization"]
        with EyasClient(link.url, headers.removeprefix("Bearer ")) as client:

            def follow(job_id):
                got[job_id] = (list(client.stream_events(job_id)), b"".join(client.follow_log(job_id)))

            def tale(number):
                words = []
                for step in range(60):
                    progress = {"type": "progress", "step": step, "steps": 60, "epoch": 0, "epochs": 1, "loss": 1.0}
                    words += [["event", progress], ["print", f"job {number} line {step} ✓ {'x' * step}"]]
                    words += [["until_file", str(go)]] if step == 30 else []
                return planned(*words, name=f"tale-{number}")

            for number in range(followed):
                ids += [job["id"] for job in client.submit(tale(number), key=f"tale-{number}")]
            threads = [threading.Thread(target=follow, args=(job_id,)) for job_id in ids]
            for thread in threads:
                thread.start()
            waits = planned(name="waits", depends_on=[ids[-1]])
            others = [client.submit(waits, key=f"waits-{number}")[0]["id"] for number in range(count - followed)]
            go.touch()
            for thread in threads:
                thread.join(120)
            assert len({*ids, *others}) == count
            assert link.lost > count / 3
    rows = daemon.client.jobs(1000)
    assert sorted(row["id"] for row in rows) == sorted([*ids, *others])
    for job_id in ids:
        events, log = got[job_id]
        assert events == daemon.file_events(job_id)
        assert len(events) > 60
        assert log == (daemon.attempt(job_id) / "output.log").read_bytes()
