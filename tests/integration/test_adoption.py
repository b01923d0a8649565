"""A daemon that comes back to a thousand jobs."""

import json
import shutil
import sqlite3
import time

import pytest


def copies(daemon, job_id, count, state):
    """Rows and directories like those of one job, under other ids and names."""
    jobs = daemon.state / "jobs"
    with sqlite3.connect(daemon.state / "eyas.db") as database:
        database.row_factory = sqlite3.Row
        job = dict(database.execute("select * from jobs where id = ?", (job_id,)).fetchone())
        attempt = dict(database.execute("select * from attempts where job_id = ?", (job_id,)).fetchone())
        for number in range(count):
            new = f"{state}{number}"
            shutil.copytree(jobs / job_id, jobs / new)
            for name in ("record.json", "spec.json"):
                file = jobs / new / name
                file.write_text(file.read_text().replace(job_id, new))
            row = {**job, "id": new, "number": None, "output_dir": f"/out/{new}", "state": state}
            if state != "succeeded":
                row |= {"ended_at": None, "reason": None}
            if state == "queued":
                row["pause_asked_at"] = job["created_at"]  # held, or the test would run them all
            insert(database, "jobs", row)
            insert(database, "attempts", {**attempt, "job_id": new})
    database.close()


def insert(database, table, row):
    marks = ", ".join("?" * len(row))
    database.execute(f"insert into {table} ({', '.join(row)}) values ({marks})", list(row.values()))


@pytest.mark.slow
def test_a_thousand_job_directories_are_adopted_in_two_seconds(planned_daemon, planned, wait_for):
    daemon = planned_daemon(EYAS_MAX_RUNNING="8")
    [ended] = daemon.client.submit(planned())
    daemon.wait_ended(ended["id"])
    live = [daemon.client.submit(planned(["until_stopped", None]))[0]["id"] for _ in range(4)]
    for job_id in live:
        daemon.wait_state(job_id, "running")
    daemon.kill()
    copies(daemon, ended["id"], 600, "succeeded")
    copies(daemon, ended["id"], 400, "queued")  # with an attempt that is over: as between two attempts
    begun = time.monotonic()
    daemon.start()
    seconds = time.monotonic() - begun
    wait_for(lambda: all(daemon.client.job(job_id)["health"] == "ok" for job_id in live))
    wait_for(lambda: daemon.client.job("queued399")["state"] == "paused")
    settled = time.monotonic() - begun
    wait_for(lambda: json.loads((daemon.state / "jobs" / "succeeded0" / "record.json").read_text()))
    assert (seconds < 3, settled < 4) == (True, True), (seconds, settled)  # the interpreter's start is in it
    for job_id in live:
        daemon.client.cancel(job_id)
        assert daemon.wait_ended(job_id)["state"] == "cancelled"
