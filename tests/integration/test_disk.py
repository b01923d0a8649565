"""Disks that are too small, and disks that fill up while jobs are submitted, run, save and are cancelled."""

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from client.http import ApiError
from eagle3_core.checkpoint.judge import judge
from eagle3_core.training.resume import find_latest
from tests.cases import make_case
from tests.tiny import make_training_inputs

MB = 1 << 20


@pytest.fixture
def on_small_disks(small_disk, planned_daemon):
    """A daemon whose state directory is a disk of its own; returns both."""

    def make(size=24 * MB, **environment):
        return small_disk(size, "state"), planned_daemon(**environment)

    return make


def training(root, **fields):
    params = make_training_inputs(root, rows=12) | fields
    return {"stage": "train", "params": params, "retry": {"max_retries": 0}}


def test_a_training_whose_checkpoints_cannot_fit_is_refused(new_daemon, small_disk, tmp_path):
    disk = small_disk(3 * MB)
    (tmp_path / "root").mkdir()
    daemon = new_daemon(EYAS_ROOTS=json.dumps([str(disk.path)]), EYAS_DISK_LOW_GB="0", OMP_NUM_THREADS="1")
    request = training(tmp_path / "root", epochs=100, output_dir=str(disk.path / "out"))
    with pytest.raises(ApiError) as caught:
        daemon.client.submit(request)
    problem = caught.value.problem
    assert (problem["status"], problem["type"]) == (507, "urn:eyas:problem:insufficient-storage")
    assert problem["errors"][0]["pointer"] == "/params/output_dir"
    for words in (f"in {disk.path / 'out'}", "101 checkpoints x", "3.1 MB are free there", "set keep_last"):
        assert words in problem["detail"]
    assert daemon.client.jobs() == []
    request["params"] |= {"epochs": 8, "keep_last": 1}
    [stored] = daemon.client.submit(request)
    job = daemon.wait_ended(stored["id"], limit_s=90)
    assert job["state"] == "succeeded", job
    rows = daemon.client.checkpoints(stored["id"])
    there = [Path(one["path"]).name for one in rows if one["removed_at"] is None]
    assert set(there) == {path.name for path in (disk.path / "out").iterdir() if path.name.isdigit()}
    assert len(there) <= 2
    assert len(rows) == 8


def test_a_job_that_no_longer_fits_waits_and_says_so(new_daemon, small_disk, tmp_path, wait_for):
    disk = small_disk(3 * MB)
    (tmp_path / "root").mkdir()
    daemon = new_daemon(EYAS_ROOTS=json.dumps([str(disk.path)]), EYAS_DISK_LOW_GB="0", OMP_NUM_THREADS="1")
    request = training(tmp_path / "root", epochs=1, output_dir=str(disk.path / "out"))
    [first] = daemon.client.submit(training(tmp_path / "root" / "first", epochs=10_000, val_ratio=0.0))
    wait_for(lambda: daemon.client.job(first["id"])["step"], limit_s=60)
    [second] = daemon.client.submit(request)
    disk.fill(leave=100_000)
    daemon.client.cancel(first["id"])
    summary = wait_for(lambda: (text := daemon.client.job(second["id"])["summary"]).count("needs") and text)
    assert f"in {disk.path / 'out'}, " in summary
    assert "kB are free" in summary
    assert daemon.client.job(second["id"])["state"] == "queued"
    disk.empty()
    assert daemon.wait_ended(second["id"], limit_s=90)["state"] == "succeeded"


def test_below_the_low_water_mark_jobs_wait_and_can_be_cancelled(on_small_disks, planned, wait_for):
    disk, daemon = on_small_disks(EYAS_DISK_LOW_GB="0.008", EYAS_DISK_RESERVE_MB="2")
    disk.fill(leave=4 * MB)
    ids = [daemon.client.submit(planned(name=f"job-{number}"))[0]["id"] for number in range(3)]
    for job_id in ids:
        text = wait_for(lambda job_id=job_id: daemon.client.job(job_id)["summary"].partition(": ")[2])
        assert text.startswith(f"waits for 8.0 MB of free disk in {daemon.state}, 4."), text
        assert text.endswith("MB are free (EYAS_DISK_LOW_GB)")
    daemon.client.cancel(ids[0])
    assert daemon.wait_ended(ids[0])["reason"] == "cancelled_by_user"
    disk.empty()
    assert [daemon.wait_ended(job_id)["state"] for job_id in ids[1:]] == ["succeeded", "succeeded"]


@pytest.mark.parametrize("reserve_mb", [0, 1])
def test_a_cancel_is_accepted_and_heeded_where_nothing_can_be_written(
    on_small_disks, planned, wait_for, tmp_path, reserve_mb
):
    disk, daemon = on_small_disks(EYAS_DISK_LOW_GB="0.001", EYAS_DISK_RESERVE_MB=str(reserve_mb), EYAS_MAX_RUNNING="1")
    begun = tmp_path / "begun"
    [running] = daemon.client.submit(planned(["touch", str(begun)], ["until_stopped", None]))
    [queued] = daemon.client.submit(planned(["until_stopped", None], name="queued"))
    wait_for(begun.exists)
    daemon.wait_state(running["id"], "running")
    process = json.loads((daemon.attempt(running["id"]) / "process.json").read_text())
    for _ in range(8):  # what the reserve gives back is taken as well
        disk.fill()
        daemon.client.health()
    for job_id in (running["id"], queued["id"]):
        disk.fill()
        daemon.client.cancel(job_id)
    wait_for(lambda: not Path(f"/proc/{process['stage']['pid']}").exists(), what="the end of the stage")
    record = daemon.attempt(running["id"]) / "exit.json"
    wait_for(record.exists, what="the exit record")
    assert json.loads(record.read_text())["stop_asked"] == "cancel"
    disk.fill()
    daemon.client.cancel(running["id"])
    daemon.kill()
    disk.fill()
    disk.empty()
    daemon.start()
    for job_id in (running["id"], queued["id"]):
        job = daemon.wait_ended(job_id)
        assert (job["state"], job["reason"]) == ("cancelled", "cancelled_by_user")
        record = daemon.state / "jobs" / job_id / "record.json"
        wait_for(lambda record=record: json.loads(record.read_text())["state"] == "cancelled")
    assert b"Traceback" not in (daemon.root / "daemon.log").read_bytes()


def test_a_disk_that_fills_up_in_a_save_ends_the_job_and_the_next_attempt_goes_on(
    new_daemon, small_disk, tmp_path, wait_for
):
    disk = small_disk(3 * MB)
    (tmp_path / "root").mkdir()
    daemon = new_daemon(EYAS_ROOTS=json.dumps([str(disk.path)]), EYAS_DISK_LOW_GB="0", OMP_NUM_THREADS="1")
    request = training(tmp_path / "root", epochs=40, keep_last=1, output_dir=str(disk.path / "out"))
    request["retry"] = {"max_retries": 1, "backoff_s": 0, "on": ["disk_full"]}
    [stored] = daemon.client.submit(request)
    wait_for(lambda: daemon.client.checkpoints(stored["id"]), limit_s=60)
    disk.fill(leave=50_000)
    job = wait_for(
        lambda: (job := daemon.client.job(stored["id"]))["attempt"] == 1 and job["summary"].count("needs") and job,
        limit_s=60,
        what="a second attempt that waits for room",
    )
    [failed] = [warning["message"] for warning in job["warnings"] if warning["code"] == "attempt_failed"]
    assert "disk_full: [Errno 28]" in failed
    assert f"{disk.path}/out/.checkpoint-" in failed
    latest, _ = find_latest(disk.path / "out")
    assert judge(latest.path).usable
    assert not [path for path in (disk.path / "out").iterdir() if path.name.endswith(".tmp")]
    disk.empty()
    job = daemon.wait_ended(stored["id"], limit_s=90)
    assert (job["state"], job["attempt"]) == ("succeeded", 2), job
    [resumed] = [fact for fact in job["setup"] if fact["title"] == "resumed"]
    assert resumed["data"]["path"] == str(latest.path)
    assert job["step"] == job["steps"]


def test_a_full_state_directory_is_no_reason_to_end_a_job(on_small_disks, planned, wait_for, tmp_path):
    disk, daemon = on_small_disks(EYAS_DISK_LOW_GB="0", EYAS_DISK_RESERVE_MB="1")
    begun, go, told = (tmp_path / name for name in ("begun", "go", "told"))
    late = [["event", {"type": "phase", "phase": "late"}], ["print", "lost"], ["touch", str(told)]]
    [stored] = daemon.client.submit(planned(["touch", str(begun)], ["until_file", str(go)], *late))
    wait_for(begun.exists)
    for _ in range(8):
        disk.fill()
        daemon.client.health()
    go.touch()
    wait_for(told.exists)
    stage = json.loads((daemon.attempt(stored["id"]) / "process.json").read_text())["stage"]["pid"]
    assert daemon.client.job(stored["id"])["state"] == "running"
    assert Path(f"/proc/{stage}").exists()
    disk.empty()
    assert daemon.wait_ended(stored["id"])["state"] == "succeeded"
    events = daemon.file_events(stored["id"])
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert "late" in [event.get("phase") for event in events]


class Moments:
    """Fills the state directory's disk at random moments of what a user does, and looks whether all goes on."""

    RETRY = {"max_retries": 20, "backoff_s": 0, "on": ["disk_full"]}  # noqa: RUF012

    def __init__(self, daemon, disk, planned, seed):
        self.daemon, self.disk, self.planned = daemon, disk, planned
        self.random = random.Random(seed)
        self.wanted = {}
        self.slowest = 0.0

    def at_a_moment(self, act):
        """Do something while the disk fills up a little earlier or later; it stays full for a while."""
        full, over = threading.Event(), threading.Event()

        def fill():
            over.wait(self.random.uniform(0, 0.2))
            while not over.is_set():
                self.disk.fill()
                full.set()
                over.wait(0.02)

        filler = threading.Thread(target=fill)
        filler.start()
        try:
            act()
            full.wait(10)
            for _ in range(4):
                self.asked(self.daemon.client.health)
                self.asked(self.daemon.client.jobs)
                over.wait(0.05)
        finally:
            over.set()
            filler.join()
            self.disk.empty()

    def asked(self, question):
        """What the daemon answers; it has to, and soon."""
        began = time.monotonic()
        answer = question()
        self.slowest = max(self.slowest, time.monotonic() - began)
        return answer

    def request(self, *plan):
        """A job with a name of its own, which is its key as well."""
        return self.planned(*plan, name=f"job-{len(self.wanted)}", retry=self.RETRY)

    def stored(self, request, state):
        """Have a job stored; returns its id, or None where a full disk was the answer."""
        try:
            [row] = self.asked(lambda: self.daemon.client.submit(request, key=request["name"]))
        except ApiError as error:
            if error.status != 507:
                raise
            return None
        self.wanted[row["id"]] = state
        return row["id"]

    def submit(self):
        request = self.request()
        self.at_a_moment(lambda: self.stored(request, "succeeded"))
        assert self.stored(request, "succeeded"), "there is room again, and the key is the same"

    def run(self):
        steps = [["event", {"type": "phase", "phase": f"phase {number}"}] for number in range(20)]
        assert self.stored(self.request(*steps), "succeeded")
        self.at_a_moment(lambda: None)

    def save(self):
        self.at_a_moment(lambda: None)

    def cancel(self):
        job_id = self.stored(self.request(["until_stopped", None]), "cancelled")
        assert job_id
        self.at_a_moment(lambda: self.asked(lambda: self.daemon.client.cancel(job_id)))


def test_fault_20_a_disk_that_fills_up_at_thirty_moments_of_submit_run_save_and_cancel_loses_nothing(
    on_small_disks, planned, wait_for, tmp_path
):
    disk, daemon = on_small_disks(
        EYAS_DISK_LOW_GB="0.002", EYAS_DISK_RESERVE_MB="1", EYAS_MAX_RUNNING="3", OMP_NUM_THREADS="1"
    )
    end = tmp_path / "end"
    [saver] = daemon.client.submit(planned(["save_until_file", str(end)], name="saver"))
    saves = daemon.state / "jobs" / saver["id"] / "artifacts"
    wait_for(lambda: [path for path in saves.glob("*") if path.name.isdigit()], limit_s=60, what="the first checkpoint")
    moments = Moments(daemon, disk, planned, seed=20_251_129)
    for number in range(30):
        [moments.submit, moments.run, moments.save, moments.cancel][number % 4]()
    end.touch()
    moments.wanted[saver["id"]] = "succeeded"
    for job_id, state in moments.wanted.items():
        job = daemon.wait_ended(job_id, limit_s=90)
        assert job["state"] == state, (job["summary"], job["warnings"], daemon.client.log(job_id).data)
        record = daemon.state / "jobs" / job_id / "record.json"
        wait_for(lambda record=record, state=state: json.loads(record.read_text())["state"] == state)
        events = list(daemon.client.events(job_id))
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        assert not [w for w in job["warnings"] if w["code"] not in ("attempt_failed",)], job["warnings"]
    assert sorted(row["id"] for row in daemon.client.jobs()) == sorted(moments.wanted), "none lost, none doubled"
    [told] = [fact["data"] for fact in daemon.client.job(saver["id"])["setup"] if fact["title"] == "saves"]
    assert told["saved"] > 30
    assert told["failed"] >= 1, "no moment came within a save"
    assert moments.slowest < 10
    log = (daemon.root / "daemon.log").read_text()
    assert "Traceback" not in log, log


def test_case_f08_what_cannot_be_read_or_written_is_refused_with_owner_and_mode(tmp_path):
    """As a user who is not root, to whom modes mean nothing."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, to become another user")
    case = make_case("F08", tmp_path)
    for path in (tmp_path, *tmp_path.parents):
        if path.owner() == "root" and not path.stat().st_mode & 0o001:
            path.chmod(path.stat().st_mode | 0o011)
    place = tmp_path / "nobody"
    place.mkdir()
    for path in [place, case, *case.rglob("*")]:
        os.chown(path, 65534, 65534)
    os.chown(case / "locked" / "0" / "model.safetensors", 0, 0)
    (case / "hidden").mkdir(mode=0o700)
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    script = Path(__file__).parent / "double" / "as_nobody.py"
    done = subprocess.run(
        [*user, sys.executable, "-P", str(script), str(place), str(case)],
        capture_output=True,
        text=True,
        check=False,
        cwd=place,
        env={**os.environ, "HOME": str(place), "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    owner = "it belongs to nobody (uid 65534), mode 0500, and this process runs as nobody (uid 65534)"
    assert told["output"] == f"{case / 'out_ro' / 'new'} cannot be written as {case / 'out_ro'}: {owner}"
    assert told["existing output"] == f"{case / 'out_ro'} cannot be written: {owner}"
    assert told["at start"] == f"output_dir {case / 'out_ro' / 'new'} cannot be written as {case / 'out_ro'}: {owner}"
    file = case / "locked" / "0" / "model.safetensors"
    [fault] = told["checkpoint"]
    assert fault.startswith(f"{file} cannot be read: it belongs to root (uid 0), mode 0000, and this")
    assert told["readable"] == []
    assert told["hidden"].startswith(f"{case / 'hidden' / '0'} cannot be read as {case / 'hidden'}: it belongs to root")
