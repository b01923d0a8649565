"""GPUs are handed out once, by UUID, and every job that waits for one says why. Eight fake GPUs, the real collector."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from client.http import ApiError, Unreachable
from eagle3_core.contract.identity import start_ticks
from tests.integration.conftest import DOUBLE, worker_python
from tests.nvml.fake import GIB, instance_uuid, uuid


def environment_of_stage(daemon, job_id):
    process = json.loads((daemon.attempt(job_id) / "process.json").read_text())
    pairs = Path(f"/proc/{process['stage']['pid']}/environ").read_bytes().split(b"\0")
    return dict(pair.decode().split("=", 1) for pair in pairs if b"=" in pair)


def start(daemon, request, **fields):
    """Submit and wait until it runs."""
    [stored] = daemon.client.submit({**request, **fields})
    return daemon.wait_state(stored["id"], "running")


def waiting(daemon, job_id, *texts):
    """The reason of a queued job, once it holds all these texts."""
    job = daemon.client.job(job_id)
    assert job["state"] == "queued", job["summary"]
    return job["waiting"] if job["waiting"] and all(text in job["waiting"] for text in texts) else None


def free(daemon):
    return [gpu["index"] for gpu in daemon.client.gpus()["gpus"] if gpu["job"] is None and not gpu["in_the_way"]]


def test_each_job_gets_its_own_gpus_and_sees_no_other(gpu_daemon, planned, wait_for):
    daemon = gpu_daemon(EYAS_MAX_RUNNING="2")
    plan = planned(["until_stopped", None])
    two = start(daemon, plan, resources={"gpus": 2, "cpus": 1})
    named = start(daemon, plan, resources={"gpu_ids": [7, uuid(3)], "gpu_memory_gib": 40})
    none = start(daemon, plan)
    assert [gpu["index"] for gpu in two["gpus"]] == ["0", "1"]
    assert named["gpus"] == [
        {"index": "3", "uuid": uuid(3), "name": "NVIDIA Test 80GB"},
        {"index": "7", "uuid": uuid(7), "name": "NVIDIA Test 80GB"},
    ]
    assert named["resources"] == {
        "gpus": 2,
        "gpu_ids": [uuid(7), uuid(3)],
        "gpu_memory_gib": 40.0,
        "cpus": None,
        "ram_gib": None,
    }
    assert (none["gpus"], none["resources"]["gpus"]) == ([], 0)
    seen = environment_of_stage(daemon, two["id"])
    assert (seen["CUDA_DEVICE_ORDER"], seen["CUDA_VISIBLE_DEVICES"]) == ("PCI_BUS_ID", f"{uuid(0)},{uuid(1)}")
    assert seen["OMP_NUM_THREADS"] == "1"
    assert environment_of_stage(daemon, named["id"])["CUDA_VISIBLE_DEVICES"] == f"{uuid(3)},{uuid(7)}"
    assert environment_of_stage(daemon, none["id"])["CUDA_VISIBLE_DEVICES"] == ""
    held = json.loads((daemon.attempt(two["id"]) / "resources.json").read_text())
    assert [gpu["uuid"] for gpu in held["gpus"]] == [uuid(0), uuid(1)]
    record = json.loads((daemon.state / "jobs" / named["id"] / "record.json").read_text())
    assert record["resources"]["gpu_ids"] == [uuid(7), uuid(3)]
    assert free(daemon) == [2, 4, 5, 6]
    listed = {row["id"]: row for row in daemon.client.jobs()}
    assert listed[two["id"]]["gpus"] == two["gpus"]
    daemon.client.cancel(two["id"])
    daemon.wait_ended(two["id"])
    wait_for(lambda: free(daemon) == [0, 1, 2, 4, 5, 6], what="the GPUs of the cancelled job")


def test_priority_then_age_and_many_gpus_are_saved_up(gpu_daemon, planned, wait_for, tmp_path):
    daemon = gpu_daemon(EYAS_GPUS="[0, 1]")
    go = tmp_path / "go"
    first = start(daemon, planned(["until_file", str(go)], name="first"), resources={"gpus": 1})
    big, small, urgent = (
        daemon.client.submit(planned(["until_file", str(go)], name=name, resources={"gpus": count}, priority=priority))[
            0
        ]
        for name, count, priority in (("big", 2, 0), ("small", 1, 0), ("urgent", 1, 5))
    )
    assert daemon.wait_state(urgent["id"], "running")["gpus"][0]["index"] == "1"
    reason = wait_for(lambda: waiting(daemon, big["id"], "urgent"))
    assert reason == (
        f"waiting for 2 GPUs; GPU 0 is used by job first ({first['id']}); GPU 1 is used by job urgent ({urgent['id']})"
    )
    assert waiting(daemon, small["id"], "waiting for 1 GPU")
    assert daemon.client.job(big["id"])["summary"] == f"queued: {reason}"
    go.touch()
    ended = [daemon.wait_ended(job["id"]) for job in (big, small)]
    assert [job["state"] for job in ended] == ["succeeded", "succeeded"]
    assert ended[0]["started_at"] < ended[1]["started_at"]


def test_a_gpu_that_somebody_else_fills_is_not_handed_out(gpu_daemon, nvml, planned, wait_for):
    daemon = gpu_daemon(EYAS_GPUS='["0", "1"]')
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as stranger:
        try:
            nvml.tell(f"proc 0 {stranger.pid} {38 * GIB}", f"used 0 {39 * GIB}", f"used 1 {30 * GIB}", "draw 1 1 1000")
            [stored] = daemon.client.submit(planned(resources={"gpu_memory_gib": 60}))
            reason = wait_for(lambda: waiting(daemon, stored["id"], f"pid {stranger.pid}"))
            assert reason.startswith(f"waiting for 1 GPU with 60 GiB free; GPU 0 is used by pid {stranger.pid}")
            assert "(38.0 GiB)" in reason
            assert reason.endswith("GPU 1 is used by processes that cannot be seen from here (30.0 GiB)")
            nvml.tell(f"used 0 {39 * GIB}", f"proc 0 4000001 {39 * GIB}", f"used 1 {25 * GIB}", f"draw 1 1 {25 * GIB}")
            reason = wait_for(lambda: waiting(daemon, stored["id"], "GPU 1 is left with 55.0 GiB free"))
            assert "GPU 0 is used by pid 4000001, which cannot be seen from here (39.0 GiB)" in reason
            gpus = daemon.client.gpus()["gpus"]
            assert gpus[0]["processes"][0] == {
                "pid": 4000001,
                "kind": "compute",
                "memory": 39 * GIB,
                "user": None,
                "foreign_user": None,
                "job": None,
            }
            assert [gpu["given"] for gpu in gpus] == [True, True, *[False] * 6]
        finally:
            stranger.kill()
    nvml.tell()
    assert daemon.wait_ended(stored["id"])["state"] == "succeeded"


REFUSED = [
    ({"resources": {"gpus": 9}}, "/resources/gpus", "9 GPUs are asked for; this host has 8"),
    ({"resources": {"gpu_ids": ["GPU-none"]}}, "/resources/gpu_ids", "there is no GPU GPU-none"),
    ({"resources": {"gpu_memory_gib": 81}}, "/resources/gpu_memory_gib", "GPU 0: 80.0 GiB"),
    ({"resources": {"cpus": 100_000}}, "/resources/cpus", "this host has"),
    ({"resources": {"ram_gib": 1e9}}, "/resources/ram_gib", "this host has"),
    ({"resources": {"gpus": 2, "gpu_ids": ["0"]}}, "/resources", "one of them is enough"),
    ({"resources": {"gpu": 1}}, "/resources/gpu", "did you mean gpus?"),
    ({"retry": {"max_retry": 1}}, "/retry/max_retry", "did you mean max_retries?"),
    ({"priority": 1.5}, "/priority", ""),
]


def test_what_the_host_can_never_give_is_refused_with_a_pointer(gpu_daemon, planned):
    daemon = gpu_daemon()
    for fields, pointer, text in REFUSED:
        for request in (planned(**fields), {"jobs": [planned(name="other"), planned(**fields)]}):
            with pytest.raises(ApiError) as refused:
                daemon.client.submit(request)
            assert refused.value.status == 422
            [fault] = refused.value.fields
            assert fault["pointer"] == ("/jobs/1" if "jobs" in request else "") + pointer
            assert text in fault["message"]
    assert daemon.client.jobs() == []


def test_a_program_gets_a_gpu_unless_it_says_otherwise(gpu_daemon, tmp_path):
    daemon = gpu_daemon(EYAS_EXTERNAL_PROGRAMS='["/bin/sh"]')

    def seen(**fields):
        argv = ["/bin/sh", "-c", 'printf "sees[%s]" "$CUDA_VISIBLE_DEVICES"']
        [stored] = daemon.client.submit({"stage": "external", "params": {"argv": argv}, **fields})
        assert daemon.wait_ended(stored["id"])["state"] == "succeeded"
        return daemon.client.log(stored["id"]).data

    assert f"sees[{uuid(0)}]".encode() in seen()
    assert b"sees[]" in seen(resources={"gpus": 0})


def test_fault_22_gpu_double_booking_over_restarts(gpu_daemon, planned, wait_for):
    """Over a killed daemon GPUs stay with their jobs, by the rows and, should these be lost, by the directories."""
    daemon = gpu_daemon(EYAS_GPUS='["2", "5"]')
    plan = planned(["until_stopped", None])
    held = {job["id"]: job["gpus"] for job in (start(daemon, plan, resources={"gpus": 1}) for _ in range(2))}
    assert sorted(gpus[0]["index"] for gpus in held.values()) == ["2", "5"]
    [late] = daemon.client.submit({**plan, "resources": {"gpus": 1}})
    wait_for(lambda: waiting(daemon, late["id"], "GPU 2 is used by job", "GPU 5 is used by job"))
    for lost in (False, True):
        daemon.kill()
        with contextlib.closing(sqlite3.connect(daemon.state / "eyas.db")) as database:
            if lost:
                database.execute("DELETE FROM gpu_leases")
                database.execute("UPDATE attempts SET gpus = '[]'")
                database.commit()
        daemon.start()
        wait_for(lambda: daemon.client.gpus()["time"])
        wait_for(lambda: waiting(daemon, late["id"], "GPU 2 is used by job", "GPU 5 is used by job"))
        for job_id, gpus in held.items():
            job = daemon.client.job(job_id)
            assert (job["state"], job["gpus"]) == ("running", gpus)
    first, *_ = held
    daemon.kill()
    for name in ("shim", "stage"):  # it ends while the daemon is away, without a record
        process = json.loads((daemon.attempt(first) / "process.json").read_text())
        os.kill(process[name]["pid"], signal.SIGKILL)
    daemon.start()
    assert daemon.wait_state(late["id"], "running")["gpus"] == held[first]


@pytest.mark.parametrize("point", ["once the attempt is stored", "with the lock held", "once the shim is started"])
def test_fault_22_a_gpu_is_held_once_wherever_the_daemon_dies(point, nvml, planned, tmp_path, daemon_class, wait_for):
    class Dying(daemon_class):
        program = (str(DOUBLE / "dying_daemon.py"), point)

    settings = {**worker_python(tmp_path), **nvml.environment, "EYAS_GPUS": '["4"]'}
    daemon = Dying(tmp_path / "state", tmp_path / "root", settings).start()
    try:
        requests = [planned(["until_stopped", None], name=name, resources={"gpus": 1}) for name in ("a", "b")]
        with contextlib.suppress(Unreachable):
            daemon.client.submit({"jobs": requests})
        wait_for(lambda: start_ticks(daemon.pid) is None, what="the daemon's death")
        daemon.kill()
        daemon.program = daemon_class.program
        daemon.start()
        jobs = {job["name"]: job["id"] for job in daemon.client.jobs()}
        assert daemon.wait_state(jobs["a"], "running")["attempt"] == 1
        wait_for(lambda: waiting(daemon, jobs["b"], f"GPU 4 is used by job a ({jobs['a']})"))
        daemon.client.cancel(jobs["a"])
        assert daemon.wait_state(jobs["b"], "running")["gpus"][0]["uuid"] == uuid(4)
    finally:
        daemon.close()


def test_mig_instances_are_handed_out_in_place_of_their_gpu(gpu_daemon, nvml, planned, wait_for):
    nvml.tell("mig 1 2", order="1")
    daemon = gpu_daemon()
    plan = planned(["until_stopped", None])
    jobs = [start(daemon, plan, resources={"gpus": 1}) for _ in range(2)]
    assert [job["gpus"][0]["index"] for job in jobs] == ["0:0", "0:1"]
    assert environment_of_stage(daemon, jobs[1]["id"])["CUDA_VISIBLE_DEVICES"] == instance_uuid(1, 1)
    parent, *instances = daemon.client.gpus()["gpus"]
    assert (parent["mig"], parent["given"], parent["uuid"]) == (True, False, uuid(1))
    assert [one["parent"] for one in instances] == [uuid(1)] * 2
    assert [one["memory_total"] for one in instances] == [40 * GIB] * 2
    assert instances[0]["utilization_percent"] is None
    assert instances[0]["reasons"]["utilization_percent"] == "Not Supported"
    [late] = daemon.client.submit({**plan, "resources": {"gpu_ids": ["0:1"]}})
    assert wait_for(lambda: waiting(daemon, late["id"], f"GPU 0:1 is used by job planned ({jobs[1]['id']})"))
    with pytest.raises(ApiError, match="no more than one MIG instance"):
        daemon.client.submit({**plan, "resources": {"gpus": 2}})


def test_indices_may_change_while_jobs_run(gpu_daemon, nvml, planned, wait_for):
    daemon = gpu_daemon()
    job = start(daemon, planned(["until_stopped", None]), resources={"gpu_ids": [0]})
    nvml.tell("generation 1", order="7 6 5 4 3 2 1 0")
    wait_for(lambda: [gpu["index"] for gpu in daemon.client.gpus()["gpus"] if gpu["job"] == job["id"]] == [7])
    assert daemon.client.job(job["id"])["gpus"] == [{"index": "0", "uuid": uuid(0), "name": "NVIDIA Test 80GB"}]
    other = start(daemon, planned(["until_stopped", None]), resources={"gpu_ids": [0]})
    assert other["gpus"][0]["uuid"] == uuid(7)


def test_without_gpus_jobs_run_on_the_cpu_as_many_as_may(planned_daemon, planned, wait_for):
    """No driver is normal; this is the machine as it is, or with its GPUs kept from Eyas."""
    daemon = planned_daemon(EYAS_GPUS="[]")
    wait_for(lambda: daemon.client.host()["host"])
    plan = planned(["until_stopped", None])
    job = start(daemon, plan)
    [late] = daemon.client.submit(plan)
    wait_for(lambda: waiting(daemon, late["id"], "1 job runs at a time (EYAS_MAX_RUNNING)"))
    with pytest.raises(ApiError, match="1 GPU is asked for; this host has none"):
        daemon.client.submit({**plan, "resources": {"gpus": 1}})
    assert (job["gpus"], job["resources"]["gpus"]) == ([], 0)
    daemon.client.cancel(job["id"])
    daemon.wait_state(late["id"], "running")
