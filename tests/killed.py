"""`python -P -m tests.killed SPEC DIRECTORY KILLS SEED`: a job killed at random moments, then begun again and ended.

Attempts are forked from this process, so that imports are paid once; what runs in them is the stage's own harness.
Prints a JSON list: for each kill the outputs that were there at that moment, the exit code of the attempt that was not
killed, and the outputs that differ in the end from those of a job nobody killed.
"""

import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from eagle3_core.contract.jobdir import JobDir
from eagle3_core.contract.params import StageParams
from eagle3_core.contract.spec import JobSpec
from worker import run

ROOT = Path(__file__).parents[1]


def outputs_at_kills(place: Path, stage: str, params: StageParams, kills: int) -> list[list[str]]:
    """Kill a job so often and see that it ends with the outputs of one nobody killed; what was there at each kill."""
    spec = place / "spec.json"
    spec.write_text(JobSpec(job_id="2026-11-29-aaaa", name=stage, stage=stage, params=params).model_dump_json())
    (place / "jobs").mkdir()
    command = [sys.executable, "-P", "-m", "tests.killed", str(spec), str(place / "jobs"), str(kills), "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    told: list[dict[str, Any]] = json.loads(done.stdout)
    assert len(told) == kills
    assert [each for each in told if each["code"] or each["differing"]] == []
    return [there for each in told for there in each["at_kill"]]


def start(job: JobDir, number: int) -> int:
    """The pid of an attempt that has begun."""
    attempt = job.attempt(number)
    attempt.path.mkdir(parents=True)
    pid = os.fork()
    if pid == 0:
        with attempt.log.open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        torch.set_num_threads(1)
        os._exit(run.main([str(attempt.path)]))
    return pid


def outputs(job: JobDir) -> dict[str, bytes]:
    """Every file of the output directory."""
    found = job.artifacts.rglob("*")
    return {str(path.relative_to(job.artifacts)): path.read_bytes() for path in found if path.is_file()}


def whole_job(job: JobDir, number: int) -> int:
    """Run an attempt to its end; returns its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(start(job, number), 0)[1])


def wait_for_a_moment(job: JobDir, chance: random.Random, seconds: float, files: int) -> None:
    """Any moment of the whole, or one soon after so many outputs, half written ones included, have come."""
    pause, end = threading.Event(), time.monotonic() + chance.uniform(0, seconds)
    if chance.random() < 0.3:
        pause.wait(end - time.monotonic())
        return
    wanted, end = chance.randint(1, files), time.monotonic() + 2 * seconds
    while time.monotonic() < end and (not job.artifacts.exists() or len(list(job.artifacts.iterdir())) < wanted):
        pause.wait(0.001)
    pause.wait(chance.uniform(0, seconds / files / 4))


def new_job(spec: Path, directory: Path) -> JobDir:
    directory.mkdir()
    shutil.copy(spec, directory / "spec.json")
    return JobDir(directory)


def main(spec: Path, directory: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    assert transformers.LlamaForCausalLM is not None  # imported when it is first asked for
    importlib.import_module(run.STAGE_MODULES[json.loads(spec.read_bytes())["stage"]])
    began = time.monotonic()
    plain = new_job(spec, directory / "plain")
    assert whole_job(plain, 1) == 0, plain.attempt(1).log.read_text()
    seconds, wanted = time.monotonic() - began, outputs(plain)
    told = []
    for kill in range(kills):
        job = new_job(spec, directory / f"killed-{kill}")
        attempts, at_kill = chance.choice([1, 1, 2]), []
        for number in range(1, attempts + 1):
            pid = start(job, number)
            wait_for_a_moment(job, chance, seconds, len(wanted))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            at_kill.append(sorted(outputs(job)) if job.artifacts.exists() else [])
        code = whole_job(job, attempts + 1)
        found = outputs(job)
        differing = sorted(name for name in wanted.keys() | found if wanted.get(name) != found.get(name))
        told.append({"at_kill": at_kill, "code": code, "differing": differing})
        if code == 0 and not differing:
            shutil.rmtree(job.path)
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
