"""Files that are damaged, in the way or gone, and links that are turned: no job is lost, stuck, or led astray."""

import json
import os
import signal
import socket

import httpx
import pytest

from client.http import ApiError
from eagle3_core.contract import proctree

HERE = ["event", {"type": "phase", "phase": "here"}]


def begin(daemon, request, wait_for):
    """Submit and wait until the stage has reached the event `here`."""
    [stored] = daemon.client.submit(request)
    wait_for(lambda: daemon.client.job(stored["id"])["phase"] == "here")
    return stored["id"]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"shim": {"pid": "x"}}', None])
def test_a_damaged_process_record_hides_no_end(shared, tmp_path, wait_for, content):
    daemon, planned = shared
    job_id = begin(daemon, planned(HERE, ["until_file", str(tmp_path / "go")]), wait_for)
    file = daemon.attempt(job_id) / "process.json"
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    assert daemon.client.job(job_id)["state"] == "running"
    (tmp_path / "go").touch()
    assert daemon.wait_ended(job_id)["state"] == "succeeded"


def test_a_job_whose_process_record_is_gone_is_lost_and_not_begun_again(shared, wait_for):
    daemon, planned = shared
    job_id = begin(daemon, planned(HERE, ["until_stopped", None]), wait_for)
    file = daemon.attempt(job_id) / "process.json"
    pids = json.loads(file.read_text())
    file.unlink()
    for who in ("shim", "stage"):
        os.kill(pids[who]["pid"], signal.SIGKILL)
    job = daemon.wait_ended(job_id)
    assert (job["state"], job["reason"], job["attempt"]) == ("failed", "worker_lost", 1)


def test_a_stage_whose_shim_died_before_naming_it_runs_and_can_be_cancelled(shared, wait_for):
    daemon, planned = shared
    job_id = begin(daemon, planned(HERE, ["until_stopped", None]), wait_for)
    file = daemon.attempt(job_id) / "process.json"
    record = json.loads(file.read_text())
    os.kill(record["shim"]["pid"], signal.SIGKILL)
    file.write_text(json.dumps({**record, "stage": None}))
    wait_for(lambda: daemon.client.job(job_id)["health"] == "unsupervised")
    daemon.client.cancel(job_id, grace_s=20)
    assert daemon.wait_ended(job_id)["state"] == "cancelled"
    wait_for(lambda: proctree.marked(job_id) == [])


def test_what_a_killed_daemon_finds_damaged(planned_daemon, planned, tmp_path, wait_for):
    """Exit records that say nothing leave the result in force; a record behind its row is brought up to date."""
    contents = ["", '{"code": "zero"}', '{"error": "it ran, and yet"}']
    daemon = planned_daemon(EYAS_MAX_RUNNING=str(len(contents)))
    [ended] = daemon.client.submit(planned())
    daemon.wait_ended(ended["id"])
    record = daemon.state / "jobs" / ended["id"] / "record.json"
    written = record.read_text()
    ids = [begin(daemon, planned(HERE, ["until_file", str(tmp_path / "go")]), wait_for) for _ in contents]
    daemon.kill()
    record.write_text(json.dumps({**json.loads(written), "state": None, "ended_at": None}))
    (tmp_path / "go").touch()
    for job_id, content in zip(ids, contents, strict=True):
        file = daemon.attempt(job_id) / "exit.json"
        wait_for(file.exists)
        file.write_text(content)
    daemon.start()
    assert [daemon.wait_ended(job_id)["state"] for job_id in ids] == ["succeeded"] * len(contents)
    wait_for(lambda: record.read_text() == written)


def test_an_order_to_stop_that_cannot_be_read_is_one_all_the_same(shared, wait_for):
    daemon, planned = shared
    job_id = begin(daemon, planned(HERE, ["until_stopped", None]), wait_for)
    (daemon.state / "jobs" / job_id / "control" / "cancel.json").mkdir()
    assert daemon.wait_ended(job_id)["state"] == "cancelled"


def test_a_damaged_job_record_is_made_anew(shared, wait_for):
    daemon, planned = shared
    job_id = begin(daemon, planned(HERE, ["until_stopped", None]), wait_for)
    record = daemon.state / "jobs" / job_id / "record.json"
    record.write_bytes(b"\xff{")
    daemon.client.cancel(job_id)
    assert json.loads(record.read_text())["cancel_asked_at"] is not None
    daemon.wait_ended(job_id)
    assert json.loads(record.read_text())["state"] == "cancelled"


def test_a_record_that_cannot_be_written_keeps_no_job_from_being_cancelled_and_is_written_later(shared, wait_for):
    daemon, planned = shared
    job_id = begin(daemon, planned(HERE, ["until_stopped", None]), wait_for)
    record = daemon.state / "jobs" / job_id / "record.json"
    record.unlink()
    record.mkdir()
    daemon.client.cancel(job_id)
    assert daemon.wait_ended(job_id)["state"] == "cancelled"
    record.rmdir()
    wait_for(record.is_file)
    assert json.loads(record.read_text())["state"] == "cancelled"


def test_a_chain_whose_directories_cannot_be_made_is_not_stored(planned_daemon, planned):
    daemon = planned_daemon()
    jobs = daemon.state / "jobs"
    jobs.rmdir()
    jobs.write_text("in the way")
    with pytest.raises(ApiError) as refused:
        daemon.client.submit({"jobs": [planned(name="a"), planned(name="b")]})
    assert (refused.value.status, refused.value.problem["type"]) == (503, "urn:eyas:problem:unavailable")
    assert daemon.client.jobs() == []
    jobs.unlink()
    jobs.mkdir()
    [stored] = daemon.client.submit(planned())
    assert daemon.wait_ended(stored["id"])["state"] == "succeeded"


def test_an_event_no_table_can_hold_becomes_a_warning(shared):
    daemon, planned = shared
    common = '"time": "2026-01-01T00:00:00Z", "boottime_s": 1'
    lines = [
        f'{{"seq": {1 << 70}, {common}, "type": "heartbeat"}}',
        f'{{"seq": 2, {common}, "type": "checkpoint", "path": "/x", "epoch": 0, "step": {1 << 70}, "bytes": 1}}',
        '{"seq": 2, "time": "2026-01-01T00:00:00", "boottime_s": 1, "type": "heartbeat"}',
        "[" * 100_000,
    ]
    [stored] = daemon.client.submit(planned(*[["raw", line] for line in lines]))
    job = daemon.wait_ended(stored["id"])
    assert job["state"] == "succeeded"
    assert [warning["code"] for warning in job["warnings"]] == ["broken_event"] * len(lines)


def test_a_link_turned_after_the_job_was_accepted_leads_nowhere(shared, tmp_path, wait_for):
    daemon, planned = shared
    holder = planned(["until_file", str(tmp_path / "go")], name="holds the slot")
    request = planned(["print", "never"])
    link = daemon.root / "turned"
    link.symlink_to(request["params"]["checkpoint"])
    request["params"]["checkpoint"] = str(link)
    daemon.client.submit(holder)
    [stored] = daemon.client.submit(request)
    link.unlink()
    link.symlink_to("/etc")
    (tmp_path / "go").touch()
    job = daemon.wait_ended(stored["id"])
    assert (job["state"], job["reason"]) == ("failed", "spawn_failed")
    assert "outside the allowed roots" in job["cause"]
    assert not daemon.attempt(stored["id"]).exists()
    link.unlink()


def test_many_silent_connections_leave_the_daemon_working(planned_daemon, planned):
    daemon = planned_daemon(EYAS_SILENT_S="3")
    address = httpx.URL(daemon.client.url)
    silent = [socket.create_connection((address.host, address.port)) for _ in range(450)]
    try:
        assert any(one.recv(1) == b"" for one in reversed(silent))
        assert daemon.client.health()["status"] == "ok"
        [stored] = daemon.client.submit(planned())
        assert daemon.wait_ended(stored["id"])["state"] == "succeeded"
    finally:
        for one in silent:
            one.close()


def unfinished(daemon, *headers):
    """A connection on which a request has begun."""
    address, token = httpx.URL(daemon.client.url), (daemon.state / "token").read_text().strip()
    lines = (
        "POST /jobs HTTP/1.1",
        "Host: localhost",
        f"Authorization: Bearer {token}",
        "Content-Type: application/json",
        "Content-Length: 1000",
        *headers,
    )
    connection = socket.create_connection((address.host, address.port), timeout=60)
    connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n{")
    return connection


def test_a_body_that_does_not_come_holds_up_nobody(planned_daemon):
    daemon = planned_daemon(EYAS_SILENT_S="1")
    with unfinished(daemon) as slow:
        answer = b"".join(iter(lambda: slow.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"problem:request-timeout" in answer
    daemon.stop()
    patient = planned_daemon(EYAS_SILENT_S="60")
    with unfinished(patient, "Expect: 100-continue") as slow:
        assert slow.recv(4096).startswith(b"HTTP/1.1 100 ")  # the daemon waits for the body
        assert patient.stop() == 0
        assert slow.recv(4096) == b""
    assert b"Traceback" not in (daemon.root / "daemon.log").read_bytes()
