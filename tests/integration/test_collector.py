"""Whatever befalls NVML, the daemon answers, running jobs go on, and every value that is missing has its reason."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from eagle3_core.contract.identity import start_ticks
from eagle3_core.contract.proctree import descendants
from tests.cases import make_case
from tests.integration.conftest import open_files
from tests.integration.test_gpus import start, waiting
from tests.nvml.fake import GIB, compile_library, instance_uuid, uuid


def collectors(daemon):
    """Pids of the collectors of a daemon."""
    return [pid for pid in descendants(daemon.pid) if b"server.system.collector" in command(pid)]


def command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def gpus(daemon):
    return {gpu["uuid"]: gpu for gpu in daemon.client.gpus()["gpus"]}


def test_fault_21_nvml_hangs_and_the_daemon_does_not(gpu_daemon, nvml, planned, wait_for, tmp_path):
    daemon = gpu_daemon()
    running = start(daemon, planned(["stream", str(tmp_path / "go")]), resources={"gpus": 1})
    [first] = collectors(daemon)
    nvml.tell("hang MemoryInfo")
    reason = wait_for(lambda: daemon.client.gpus()["reason"], what="the reason of the silence")
    assert re.fullmatch(r"NVML has not answered for \d+ s", reason)
    [stored] = daemon.client.submit(planned(resources={"gpus": 1}))
    wait_for(lambda: waiting(daemon, stored["id"], "waiting for 1 GPU; NVML has not answered for"))
    [train] = daemon.client.submit(planned(name="no GPU"))
    assert daemon.wait_ended(train["id"])["state"] == "succeeded"
    before = daemon.client.job(running["id"])["step"]
    slowest = 0.0
    for _ in range(20):
        begun = time.monotonic()
        daemon.client.gpus()
        slowest = max(slowest, time.monotonic() - begun)
    assert slowest < 2
    assert daemon.client.host()["reason"] is None  # the host is still looked at
    wait_for(lambda: collectors(daemon) not in ([first], []), what="another collector")
    assert daemon.client.job(running["id"])["state"] == "running"
    assert daemon.client.job(running["id"])["step"] > before
    nvml.tell()
    assert daemon.wait_ended(stored["id"], limit_s=90)["state"] == "succeeded"
    assert daemon.client.gpus()["reason"] is None
    assert daemon.client.host()["collectors_left_behind"] == 0


def test_fault_21_a_collector_that_stands_still_is_replaced(gpu_daemon, planned, wait_for):
    daemon = gpu_daemon()
    start(daemon, planned(["until_stopped", None]))  # looked at every second
    [first] = collectors(daemon)
    os.kill(first, signal.SIGSTOP)
    reason = wait_for(lambda: daemon.client.host()["reason"] or daemon.client.gpus()["reason"])
    assert "the collector of GPU and host metrics has not answered for" in reason
    wait_for(lambda: start_ticks(first) is None, what="its death")
    wait_for(lambda: daemon.client.gpus()["reason"] is None, what="another one")
    assert len(collectors(daemon)) == 1
    os.kill(collectors(daemon)[0], signal.SIGKILL)
    wait_for(lambda: [pid for pid in collectors(daemon) if start_ticks(pid)] != [], what="a third")


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_the_collector_goes_with_the_daemon_and_holds_nothing(gpu_daemon, nvml, planned, wait_for, how):
    daemon = gpu_daemon()
    start(daemon, planned(["until_stopped", None]))  # looked at every second
    [pid] = collectors(daemon)
    held = open_files(pid)
    assert not [path for path in held if str(daemon.state) in path]
    assert not [path for path in held if path.startswith("socket:")]
    nvml.tell("hang UtilizationRates")
    wait_for(lambda: daemon.client.gpus()["reason"])
    last = collectors(daemon)
    getattr(daemon, how)()
    wait_for(lambda: not any(start_ticks(one) for one in (pid, *last)), what="the collector's end")
    daemon.start()  # no lock is held


def test_fault_21_a_lost_gpu_leaves_the_others_shown(gpu_daemon, nvml, planned, wait_for):
    daemon = gpu_daemon(EYAS_GPUS="[2, 3]")
    job = start(daemon, planned(["until_stopped", None]), resources={"gpu_ids": ["3"]})
    nvml.tell("error 3 * 15")
    wait_for(lambda: gpus(daemon).get(uuid(3), {}).get("lost"), what="the loss")
    shown = gpus(daemon)
    assert shown[uuid(3)]["lost"] == "GPU is lost"
    assert shown[uuid(3)]["memory_used"] is None
    assert shown[uuid(3)]["reasons"]["memory_used"] == "GPU is lost"
    assert shown[uuid(3)]["job"] == job["id"]
    assert len(shown) == 8
    assert shown[uuid(4)]["temperature_c"] == 44
    assert daemon.client.job(job["id"])["state"] == "running"
    daemon.client.cancel(job["id"])
    daemon.wait_ended(job["id"])
    [late] = daemon.client.submit(planned(resources={"gpus": 2}))
    wait_for(lambda: waiting(daemon, late["id"], "GPU 3 is not answering (GPU is lost)", "GPU 2 is free"))
    [small] = daemon.client.submit(planned(resources={"gpus": 1}))
    assert daemon.wait_ended(small["id"])["gpus"][0]["uuid"] == uuid(2)
    nvml.tell()
    assert daemon.wait_ended(late["id"])["state"] == "succeeded"


def test_fault_21_the_driver_is_loaded_anew(gpu_daemon, nvml, planned, wait_for):
    daemon = gpu_daemon()
    job = start(daemon, planned(["until_stopped", None]), resources={"gpus": 1})
    nvml.tell("init 9", "generation 1")
    wait_for(lambda: daemon.client.gpus()["reason"] == "NVML says: Driver Not Loaded", what="the driver's absence")
    [late] = daemon.client.submit(planned(resources={"gpus": 1}))
    wait_for(lambda: waiting(daemon, late["id"], "waiting for 1 GPU; NVML says: Driver Not Loaded"))
    with pytest.raises(Exception, match="GPU 3 cannot be turned into a UUID now: NVML says: Driver Not Loaded"):
        daemon.client.submit(planned(resources={"gpu_ids": ["3"]}))
    nvml.tell("generation 2")
    assert daemon.wait_ended(late["id"])["state"] == "succeeded"
    assert daemon.client.job(job["id"])["state"] == "running"


def test_fault_21_a_library_that_was_replaced_is_loaded_anew(gpu_daemon, nvml, planned, wait_for, tmp_path):
    """The old one stays in the process whatever is done in it; the collector starts itself again in its place."""
    nvml.directory = tmp_path / "driver"
    nvml.directory.mkdir()
    compile_library(nvml.directory)
    daemon = gpu_daemon()
    start(daemon, planned(["until_stopped", None]))  # looked at every second
    [pid] = collectors(daemon)

    def loaded():
        maps = Path(f"/proc/{pid}/maps").read_text()
        return {line.split()[4] for line in maps.splitlines() if "libnvidia-ml" in line}

    [before] = loaded()
    compile_library(nvml.directory)
    nvml.tell("init 18", "generation 1")
    wait_for(lambda: daemon.client.gpus()["reason"] == DIFFERENT)
    wait_for(lambda: loaded() not in (set(), {before}), limit_s=60, what="the new library in the same process")
    nvml.tell("generation 1")
    wait_for(lambda: daemon.client.gpus()["reason"] is None, limit_s=60)
    assert collectors(daemon) == [pid]


DIFFERENT = "NVML says: library and loaded driver are of different versions; load the new driver, or reboot"

J07 = {
    "uma.csv": ["error 0 MemoryInfo 3"],
    "mig.csv": ["mig 0 1"],
    "err.csv": ["init 18"],
    "none.csv": [],
    "partial.csv": ["error 0 Temperature 999", "error 1 * 15"],
    "blank.csv": ["hang Count"],
}
ORDER = {"none.csv": "", "partial.csv": "0 1"}


@pytest.mark.parametrize("name", J07)
def test_case_j07_a_value_that_is_missing_has_its_reason(planned_daemon, nvml, planned, wait_for, tmp_path, name):
    """The case is answers of nvidia-smi as text, which nothing here reads: NVML is asked. The same six situations."""
    assert {path.name for path in make_case("J07", tmp_path).iterdir()} == set(J07)
    nvml.tell(*J07[name], order=ORDER.get(name, "0"))
    daemon = planned_daemon(**nvml.environment)
    wait_for(lambda: daemon.client.gpus()["time"])
    answer = daemon.client.gpus()
    shown = answer["gpus"]
    if name == "uma.csv":
        assert [shown[0][f"memory_{part}"] for part in ("total", "used", "free")] == [None] * 3
        assert shown[0]["reasons"]["memory_used"] == "Not Supported"
        assert shown[0]["temperature_c"] == 40
    elif name == "mig.csv":
        assert [gpu["uuid"] for gpu in shown] == [uuid(0), instance_uuid(0, 0)]
        assert (shown[0]["utilization_percent"], shown[1]["utilization_percent"]) == (0, None)
        assert shown[1]["reasons"]["utilization_percent"] == "Not Supported"
    elif name == "err.csv":
        assert (shown, answer["reason"]) == ([], DIFFERENT)
    elif name == "none.csv":
        assert (shown, answer["reason"]) == ([], None)
    elif name == "partial.csv":
        assert (shown[0]["temperature_c"], shown[0]["reasons"]["temperature_c"]) == (None, "Unknown Error")
        assert shown[0]["power_w"] == 70.5
        assert shown[1]["lost"] == "GPU is lost"
    else:
        assert answer["reason"].startswith("NVML has not answered for")
        assert daemon.client.host()["host"]["ram_total"] > GIB
    [stored] = daemon.client.submit(planned())
    assert daemon.wait_ended(stored["id"])["state"] == "succeeded"


def test_samples_of_a_job_over_its_life(gpu_daemon, nvml, planned, wait_for, tmp_path):
    """Only its own GPUs and processes, the host, and what the stage reports; a killed daemon costs no row before."""
    daemon = gpu_daemon()
    go = tmp_path / "go"
    told = [{"type": "progress", "step": n, "steps": 3, "loss": 1 / n, "accuracy": [0.5]} for n in (1, 2, 3)]
    job = start(
        daemon, planned(*(["event", event] for event in told), ["until_file", str(go)]), resources={"gpu_ids": [5]}
    )
    stage = json.loads((daemon.attempt(job["id"]) / "process.json").read_text())["stage"]["pid"]
    nvml.tell(f"proc 5 {stage} {7 * GIB}", f"used 5 {8 * GIB}", f"proc 6 {stage} {GIB}", "util 5 93")

    def series(*names, **options):
        return daemon.client.metrics(job["id"], names, **options)["series"]

    def points(name, **options):
        return series(name, **options).get(name, {"points": []})["points"]

    wait_for(lambda: 7 * GIB in [value for _, value in points("gpu.5.job_memory")])
    answer = daemon.client.metrics(job["id"])
    assert {name.rsplit(".", 1)[0] for name in answer["names"] if name.startswith("gpu.")} == {"gpu.5"}
    assert [value for _, value in answer["series"]["train.loss"]["points"]] == [1.0, 0.5, 1 / 3]
    assert [value for _, value in answer["series"]["train.accuracy.0"]["points"]] == [0.5] * 3
    assert gpus(daemon)[uuid(5)]["processes"][0]["job"] == job["id"]
    file = daemon.state / "jobs" / job["id"] / "metrics" / "1s.jsonl"
    daemon.kill()
    rows = len(file.read_bytes().splitlines())
    with file.open("ab") as torn:
        torn.write(b"[17643")
    daemon.start()
    before = points("gpu.5.memory_used")
    assert len(before) >= rows - 3
    wait_for(lambda: len(points("gpu.5.memory_used")) > len(before) + 1)
    go.touch()
    daemon.wait_ended(job["id"])
    found = series("host.*", "gpu.5.utilization_percent_max", max_points=2)
    assert {name.split(".")[0] for name in found} == {"host", "gpu"}
    assert max(len(one["points"]) for one in found.values()) == 2
    assert max(value for _, value in found["gpu.5.utilization_percent_max"]["points"]) == 93
    last = points("host.ram_used")[-1][0]
    assert points("host.ram_used", since=last) == []
    wait_for(lambda: (file.parent / "60s.jsonl").exists(), what="the row under way when the job ended")


def test_the_host_is_shown(planned_daemon, wait_for):
    daemon = planned_daemon()
    shown = wait_for(lambda: daemon.client.host()["host"])
    assert 0 <= shown["ram_used"] <= shown["ram_total"]
    assert str(daemon.state) in [disk["path"] for disk in shown["disks"]]
    assert shown["disks"][0]["free"] > 0
    missing = {name for name, value in shown.items() if value is None}
    assert missing == set(shown["reasons"])
