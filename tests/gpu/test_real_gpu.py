"""What the fake NVML library stands for, on a real one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.conftest import ask_nvidia_smi
from tests.tiny import make_training_inputs

pytestmark = pytest.mark.gpu

WHICH = """
import json, os, torch
free, total = torch.cuda.mem_get_info(0)
print("SEES", json.dumps({"count": torch.cuda.device_count(), "uuid": str(torch.cuda.get_device_properties(0).uuid),
    "total": total, "visible": os.environ["CUDA_VISIBLE_DEVICES"]}))
"""

HOLD = """
import signal, torch
block = torch.zeros(int(3e9), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("holds", flush=True)
signal.pause()
"""


def log_of(daemon, job_id):
    return daemon.client.log(job_id).data.decode()


def test_samples_are_what_nvidia_smi_says(gpu_daemon, cards):
    daemon = gpu_daemon()
    shown = {gpu["uuid"]: gpu for gpu in daemon.client.gpus()["gpus"] if gpu["instance"] is None}
    assert set(shown) == {card["uuid"] for card in cards}
    for card in ask_nvidia_smi():
        gpu = shown[card["uuid"]]
        assert (str(gpu["index"]), gpu["name"]) == (card["index"], card["name"])
        for name, field, scale, slack in (
            ("memory.total", "memory_total", 1 << 20, 2 << 30),
            ("memory.used", "memory_used", 1 << 20, 2 << 30),
            ("temperature.gpu", "temperature_c", 1, 15),
            ("power.draw", "power_w", 1, 400),
        ):
            if gpu[field] is None:
                assert gpu["reasons"][field]
            else:
                assert gpu[field] == pytest.approx(float(card[name]) * scale, abs=slack), name


def test_a_job_sees_the_gpu_it_was_given_and_no_other(gpu_daemon, cards):
    daemon = gpu_daemon(EYAS_EXTERNAL_PROGRAMS=json.dumps([str(Path(sys.executable).resolve())]))
    for card in cards:
        request = {
            "stage": "external",
            "params": {"argv": [sys.executable, "-c", WHICH]},
            "resources": {"gpu_ids": [card["uuid"]]},
        }
        [stored] = daemon.client.submit(request)
        job = daemon.wait_ended(stored["id"], limit_s=180)
        assert job["state"] == "succeeded", job["cause"]
        seen = json.loads(log_of(daemon, stored["id"]).split("SEES ")[1].splitlines()[0])
        assert (seen["count"], seen["visible"]) == (1, card["uuid"])
        assert seen["uuid"].removeprefix("GPU-") == card["uuid"].removeprefix("GPU-")


def test_a_strangers_process_keeps_its_gpu(planned_gpu_daemon, cards, wait_for):
    daemon, planned = planned_gpu_daemon
    environment = {"CUDA_VISIBLE_DEVICES": cards[0]["uuid"], "PATH": "/usr/bin:/bin"}
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, env=environment) as stranger:
        try:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == b"holds\n"
            [stored] = daemon.client.submit(planned(resources={"gpu_ids": [cards[0]["uuid"]]}))
            wait_for(lambda: "is used by" in (daemon.client.job(stored["id"])["waiting"] or ""), limit_s=60)
        finally:
            stranger.kill()
    assert daemon.wait_ended(stored["id"], limit_s=60)["state"] == "succeeded"


def test_a_training_runs_on_the_gpu_and_its_memory_is_seen(gpu_daemon, cards, tmp_path):
    daemon = gpu_daemon()
    params = {**make_training_inputs(daemon.root, rows=64), "epochs": 3, "device": "cuda"}
    [stored] = daemon.client.submit({"stage": "train", "params": params})
    job = daemon.wait_ended(stored["id"], limit_s=300)
    assert job["state"] == "succeeded", job["cause"]
    [gpu] = job["gpus"]
    assert gpu["uuid"] in {card["uuid"] for card in cards}
    series = daemon.client.metrics(stored["id"])["series"]
    assert series["train.loss"]["points"]
    assert max(value for _, value in series[f"gpu.{gpu['index']}.memory_used"]["points"]) > 0
