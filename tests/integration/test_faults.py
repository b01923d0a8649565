"""Faults that job services are known for, one test a class; docs/faults.md lists all of them."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from datetime import datetime
from pathlib import Path

import pytest

from client.http import ApiError, Unreachable
from eagle3_core.contract import proctree
from eagle3_core.contract.identity import start_ticks
from tests.chaos.daemon import Clock, libfaketime, zombies
from tests.integration.conftest import DOUBLE, Planner, worker_python
from tests.integration.double.dying_daemon import POINTS

SHELL = "/bin/sh"


def settings(place):
    return {
        **worker_python(place),
        "EYAS_EXTERNAL_PROGRAMS": json.dumps([SHELL, str(Path(sys.executable).resolve())]),
        "EYAS_MAX_RUNNING": "4",
    }


@pytest.fixture(scope="module")
def shared(tmp_path_factory, daemon_class):
    place = tmp_path_factory.mktemp("faults")
    root = place / "root"
    root.mkdir()
    daemon = daemon_class(place / "state", root, settings(place)).start()
    yield daemon, Planner(root)
    daemon.close()


def script(text, name="script"):
    return {"name": name, "stage": "external", "params": {"argv": [SHELL, "-c", text]}}


def python(text, name="python"):
    return {"name": name, "stage": "external", "params": {"argv": [sys.executable, "-I", "-S", "-c", text]}}


def resident_mb(pid):
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def whole_log(daemon, job_id):
    data = b""
    while (part := daemon.client.log(job_id, offset=len(data))).data:
        data += part.data
    return data


def workers_of(daemon, job_id):
    return json.loads((daemon.attempt(job_id) / "process.json").read_text())


def test_fault_01_orphans(shared, wait_for):
    """Two levels and a session of its own each, one without the job's mark: nothing outlives a cancel."""
    daemon, _ = shared
    text = "setsid sh -c 'sleep 1000 & sleep 1000' & env -i setsid sleep 1000 & echo ready; wait"
    [stored] = daemon.client.submit(script(text))
    wait_for(lambda: b"ready" in daemon.client.log(stored["id"]).data)
    shim = workers_of(daemon, stored["id"])["shim"]["pid"]
    tree = wait_for(lambda: len(found := proctree.descendants(shim)) >= 6 and found)
    daemon.client.cancel(stored["id"])
    assert daemon.wait_ended(stored["id"])["state"] == "cancelled"
    assert [pid for pid in tree if start_ticks(pid) is not None] == []
    wait_for(lambda: proctree.marked(stored["id"]) == [])


def test_fault_02_zombies(shared, wait_for):
    daemon, planned = shared
    stored = daemon.client.submit({"jobs": [planned(["child", {}], name=f"short {n}") for n in range(8)]})
    assert {daemon.wait_ended(one["id"])["state"] for one in stored} == {"succeeded"}
    wait_for(lambda: not zombies({daemon.pid}), what="no defunct shim")
    child = subprocess.Popen(["/bin/true"])
    wait_for(lambda: zombies({os.getpid()}))
    assert start_ticks(child.pid) is None  # defunct is gone, although a signal could be sent
    os.kill(child.pid, 0)
    child.wait()


def test_fault_03_pid_reuse(planned_daemon, planned):
    """The numbers of shim and stage belong to somebody else by now: that one is neither adopted nor signalled."""
    daemon = planned_daemon()
    [stored] = daemon.client.submit(planned(["until_stopped", None]))
    daemon.wait_state(stored["id"], "running")
    daemon.kill()
    process = workers_of(daemon, stored["id"])
    for pid in (process["shim"]["pid"], process["stage"]["pid"]):
        os.kill(pid, signal.SIGKILL)
    with subprocess.Popen(["/bin/sleep", "1000"]) as foreign:
        for role in ("shim", "stage"):
            process[role]["pid"] = foreign.pid
        (daemon.attempt(stored["id"]) / "process.json").write_text(json.dumps(process))
        (daemon.state / "daemon.json").write_text('{"url": "http://127.0.0.1:1", "pid": 1}')
        daemon.start()
        with contextlib.suppress(ApiError):
            daemon.client.cancel(stored["id"], grace_s=0)
        job = daemon.wait_ended(stored["id"])
        assert job["state"] in ("failed", "cancelled")
        assert job["reason"] in ("worker_lost", "cancelled_by_user")
        assert start_ticks(foreign.pid) is not None
        foreign.kill()


@pytest.mark.parametrize("point", POINTS)
def test_fault_04_killed_between_fork_and_commit(tmp_path, daemon_class, planned, wait_for, point):
    """The daemon dies at one point of a job's way; the job is stored once, runs once, and its end is kept."""

    class Dying(daemon_class):
        program = (str(DOUBLE / "dying_daemon.py"), point)

    daemon = Dying(tmp_path / "state", tmp_path / "root", worker_python(tmp_path)).start()
    try:
        with contextlib.suppress(Unreachable):
            daemon.client.submit(planned(["print", "truly started"]))
        wait_for(lambda: start_ticks(daemon.pid) is None, what="the daemon's death")
        daemon.kill()
        daemon.program = daemon_class.program
        daemon.start()
        [row] = daemon.client.jobs()
        job = daemon.wait_ended(row["id"])
        assert (job["state"], job["attempt"]) == ("succeeded", 1)
        assert whole_log(daemon, job["id"]).count(b"truly started") == 1
        record = daemon.state / "jobs" / job["id"] / "record.json"
        wait_for(lambda: json.loads(record.read_text())["state"] == "succeeded")
    finally:
        daemon.close()


def test_fault_06_cancel_races(shared, wait_for):
    """Cancelled at any moment of its start: cancelled it is, and nothing of it lives."""
    daemon, planned = shared
    ids = []
    for moment in range(8):
        [stored] = daemon.client.submit(planned(["until_stopped", None]))
        ids.append(stored["id"])
        threading.Event().wait(moment * 0.04)  # each a little later in the life of the job
        daemon.client.cancel(stored["id"])
    for job_id in ids:
        job = daemon.wait_ended(job_id)
        assert (job["state"], job["reason"]) == ("cancelled", "cancelled_by_user")
        assert daemon.client.cancel(job_id)["state"] == "cancelled"
    wait_for(lambda: not any(proctree.marked(job_id) for job_id in ids))


def test_fault_08_sighup(shared, tmp_path, wait_for):
    """No terminal, a session of its own, and a hangup that comes all the same is no reason to end."""
    daemon, planned = shared
    go = tmp_path / "go"
    [stored] = daemon.client.submit(planned(["until_file", str(go)]))
    daemon.wait_state(stored["id"], "running")
    process = workers_of(daemon, stored["id"])
    for role in ("shim", "stage"):
        pid = process[role]["pid"]
        assert os.getsid(pid) == pid != os.getsid(daemon.pid)
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        assert fields[4] == "0"  # no controlling terminal
        assert Path(f"/proc/{pid}/fd/0").readlink() == Path("/dev/null")
        os.killpg(pid, signal.SIGHUP)
    assert daemon.client.job(stored["id"])["state"] == "running"
    go.touch()
    assert daemon.wait_ended(stored["id"])["state"] == "succeeded"


def test_fault_09_grace(shared, wait_for):
    """A program that needs a while to save gets it, and is not killed while its grace lasts."""
    daemon, _ = shared
    text = "trap 'sleep 0.7; echo saved; exit 0' TERM; echo ready; while :; do sleep 0.02; done"
    [stored] = daemon.client.submit(script(text))
    wait_for(lambda: b"ready" in daemon.client.log(stored["id"]).data)
    daemon.client.cancel(stored["id"], grace_s=20)
    assert daemon.wait_ended(stored["id"])["state"] == "cancelled"
    assert b"saved\n" in whole_log(daemon, stored["id"])
    record = json.loads((daemon.attempt(stored["id"]) / "exit.json").read_text())
    assert not record["killed_after_grace"]
    assert record["seconds"] > 0.7


def test_fault_10_an_oom_kill_is_no_success(shared):
    """A child is killed and the program still exits 0: without its output that is a failure."""
    daemon, _ = shared
    request = script("sh -c 'kill -9 $$'; exit 0")
    request["params"]["expect_outputs"] = ["states.safetensors"]
    [stored] = daemon.client.submit(request)
    job = daemon.wait_ended(stored["id"])
    assert (job["state"], job["reason"]) == ("failed", "bad_data")
    assert "states.safetensors" in job["cause"]


def test_fault_11_killed_but_shown_running(shared):
    daemon, planned = shared
    [stored] = daemon.client.submit(planned(["until_stopped", None]))
    daemon.wait_state(stored["id"], "running")
    process = workers_of(daemon, stored["id"])
    for role in ("shim", "stage"):
        os.kill(process[role]["pid"], signal.SIGKILL)
    job = daemon.wait_ended(stored["id"])
    assert (job["state"], job["reason"]) == ("failed", "worker_lost")


def test_fault_12_clock_jumps_and_zones(tmp_path, daemon_class, planned, wait_for):
    """Another zone, and a clock that is set forth and back by an hour under a running job."""
    clock = Clock(tmp_path)
    environment = {**worker_python(tmp_path), "TZ": "Asia/Kolkata", "EYAS_QUIET_AFTER_S": "30", **clock.environment}
    daemon = daemon_class(tmp_path / "state", tmp_path / "root", environment).start()
    try:
        go = tmp_path / "go"
        [stored] = daemon.client.submit(planned(["stream", str(go)]))
        first = wait_for(lambda: (job := daemon.client.job(stored["id"]))["last_event_at"] and job)
        assert first["created_at"].endswith(("Z", "+00:00"))
        for offset in (3600, -3600) if libfaketime() else ():
            clock.jump(offset)
            step = daemon.client.job(stored["id"])["step"] or 0
            wait_for(lambda offset=offset: clock_of(daemon, stored["id"], first) * offset > 0)
            job = wait_for(
                lambda step=step: ((now := daemon.client.job(stored["id"]))["step"] or 0) > step + 20 and now
            )
            assert (job["state"], job["health"]) == ("running", "ok")
            assert 0 <= job["elapsed_s"] < 600
        go.touch()
        job = daemon.wait_ended(stored["id"])
        assert job["state"] == "succeeded"
        assert 0 < job["elapsed_s"] < 600
        times = [event["boottime_s"] for event in daemon.client.events(stored["id"])]
        assert times == sorted(times)
    finally:
        daemon.close()
        clock.tidy()
    if not libfaketime():
        pytest.skip("the zone is checked; the clock cannot be moved without libfaketime")


def clock_of(daemon, job_id, first):
    """How far the last event's time is from the job's beginning, in half hours, towards zero."""
    last = datetime.fromisoformat(daemon.client.job(job_id)["last_event_at"])
    return int((last - datetime.fromisoformat(first["created_at"])).total_seconds() / 1800)


def test_fault_13_no_byte_of_the_log_is_lost_at_a_stop(shared, wait_for):
    daemon, _ = shared
    text = (
        "import os, signal, sys\n"
        "def last_words(*_):\n"
        "    for n in range(20000): sys.stdout.write(f'last word {n}\\n')\n"
        "    sys.stdout.flush(); os._exit(0)\n"
        "signal.signal(signal.SIGTERM, last_words)\n"
        "print('ready', flush=True)\n"
        "while True: signal.pause()\n"
    )
    [stored] = daemon.client.submit(python(text))
    wait_for(lambda: b"ready" in daemon.client.log(stored["id"]).data)
    daemon.client.cancel(stored["id"])
    assert daemon.wait_ended(stored["id"])["state"] == "cancelled"
    log = whole_log(daemon, stored["id"])
    assert log == (daemon.attempt(stored["id"]) / "output.log").read_bytes()
    assert log.count(b"last word ") == 20000


def test_fault_14_bytes_that_are_no_text(shared):
    """Half a character, and bytes that never are one: on the wire as they were, and in no answer's way."""
    daemon, _ = shared
    odd = "\\303\\050\\377 \\360\\237\\246\\205 \\360\\237"
    [stored] = daemon.client.submit(script(f"printf 'first {odd}'; printf '\\246\\205'; printf '{odd}'; exit 3"))
    job = daemon.wait_ended(stored["id"])
    assert job["state"] == "failed"
    log = whole_log(daemon, job["id"])
    assert b"first \xc3(\xff \xf0\x9f\xa6\x85 \xf0\x9f\xa6\x85\xc3(\xff \xf0\x9f\xa6\x85 \xf0\x9f" in log
    place = log.index(b"\xf0\x9f\xa6\x85")
    assert daemon.client.log(job["id"], offset=place + 2, limit=2).data == b"\xa6\x85"
    assert job["id"] in [row["id"] for row in daemon.client.jobs()]


def test_fault_15_progress_bars(shared):
    """A bar that is drawn over and over is one line; its last state is the last word."""
    daemon, planned = shared
    bar = "".join(f"\rtrain: {n // 20}%|{'#' * (n % 40)}| {n}/2000" for n in range(2001))
    [stored] = daemon.client.submit(planned(["print", bar], ["exit", 99]))
    job = daemon.wait_ended(stored["id"])
    assert "2000/2000" in job["cause"]
    assert "1999" not in job["cause"]
    assert b"\r" in whole_log(daemon, job["id"])


def test_fault_16_huge_lines(shared):
    """50 MB without a newline: the program is not held up, the daemon does not read it all."""
    daemon, _ = shared
    before = resident_mb(daemon.pid)
    [stored] = daemon.client.submit(script("head -c 50000000 /dev/zero | tr '\\0' x; exit 3"))
    job = daemon.wait_ended(stored["id"])
    assert "exited with code 3" in job["cause"]
    part = daemon.client.log(job["id"], offset=49_000_000, limit=1000)
    assert part.data == b"x" * 1000
    assert part.size > 50_000_000
    assert resident_mb(daemon.pid) - before < 40


def test_fault_17_huge_logs(shared):
    """The end of a log of 2 GB, and a piece of its middle, cost what they weigh."""
    daemon, planned = shared
    [stored] = daemon.client.submit(planned(["print", "x"]))
    daemon.wait_ended(stored["id"])
    log = daemon.attempt(stored["id"]) / "output.log"
    os.truncate(log, 2 << 30)
    with log.open("ab") as file:
        file.write(b"the end\n")
    before = resident_mb(daemon.pid)
    for offset in (0, 1 << 30, (2 << 30) - 65_536):
        assert len(daemon.client.log(stored["id"], offset=offset, limit=65_536).data) == 65_536
    assert daemon.client.log(stored["id"], offset=2 << 30).data == b"the end\n"
    assert resident_mb(daemon.pid) - before < 20
    log.unlink()


def test_fault_18_database_is_locked(shared, wait_for):
    """Somebody else holds the write lock: requests wait for it, and nothing is lost or refused."""
    daemon, planned = shared
    log = daemon.root / "daemon.log"
    held = sqlite3.connect(daemon.state / "eyas.db", isolation_level=None, check_same_thread=False)
    held.execute("BEGIN IMMEDIATE")
    release = threading.Timer(1.5, held.rollback)
    release.start()
    stored = [daemon.client.submit(planned(name=f"late {n}"))[0] for n in range(3)]
    release.join()
    held.close()
    assert {daemon.wait_ended(one["id"])["state"] for one in stored} == {"succeeded"}
    assert b"database is locked" not in log.read_bytes()


def test_fault_23_progress_cannot_be_forged_by_the_log(shared):
    """Lines that look like events are text: only the stage's own file tells."""
    daemon, planned = shared
    forged = (
        '{"seq": 1, "time": "2026-01-01T00:00:00Z", "boottime_s": 1, "type": "result", "data": {}, "artifacts": {}}'
    )
    [stored] = daemon.client.submit(planned(["print", f"{forged}\n<script>alert(1)</script>\x1b[2J"], ["exit", 0]))
    job = daemon.wait_ended(stored["id"])
    assert (job["state"], job["reason"]) == ("failed", "internal_error")
    assert job["result"] is None
