"""Programs that are not Eyas's: watched under `external`, and adopted after somebody started them with nohup."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from client.http import ApiError
from eagle3_core.contract.identity import start_ticks

TRAINER = Path(__file__).with_name("foreign_trainer.py")
PYTHON = str(Path(sys.executable).resolve())
LIMIT_S = 90.0

TOLD = r"Epoch (?P<epoch>\d+)/(?P<epochs>\d+) step (?P<step>\d+)/(?P<steps>\d+) loss (?P<loss>\S+)"

SCRIPT = """
import pathlib, select, sys
gates = pathlib.Path(sys.argv[1])
def wait(name):
    while not (gates / name).exists():
        select.select([], [], [], 0.02)
for step in range(1, 13):
    print(f"Epoch {1 + (step - 1) // 6}/2 step {step}/12 loss {6 - step / 4:.2f} lr 3.0e-05", flush=True)
    if step in (2, 5, 9):
        wait(str(step))
"""
"""A trainer in the style of the nohup command in the README: it says so, and that is all."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, daemon_class: Any) -> Iterator[Any]:
    place = tmp_path_factory.mktemp("foreign")
    (place / "root").mkdir()
    environment = {"EYAS_EXTERNAL_PROGRAMS": json.dumps([PYTHON, "/bin/sh"]), "EYAS_MAX_RUNNING": "2"}
    made = daemon_class(place / "state", place / "root", environment).start()
    yield made
    made.close()


@pytest.fixture
def place(daemon: Any) -> Path:
    """A directory of the test's own under the root, with gates in it."""
    made = Path(tempfile.mkdtemp(dir=daemon.root))
    (made / "gates").mkdir()
    return made


def run(daemon: Any, script: str, *arguments: str, **params: Any) -> dict[str, Any]:
    request = {"stage": "external", "params": {"argv": ["/bin/sh", "-c", script, "sh", *arguments], **params}}
    [stored] = daemon.client.submit(request)
    return daemon.wait_ended(stored["id"], LIMIT_S)


def warnings_of(job: dict[str, Any]) -> list[str]:
    return [warning["code"] for warning in job["warnings"]]


def make_checkpoint(directory: Path, value: float) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 8}))
    save_file({"w": torch.linspace(0, value, 64).reshape(8, 8)}, directory / "model.safetensors")
    return directory


def test_a_hugging_face_trainer_is_watched_like_ours(daemon: Any, place: Path, wait_for: Any) -> None:
    gates, output = place / "gates", place / "output"
    params = {"argv": [PYTHON, "-P", str(TRAINER), str(output), str(gates)], "output_dir": str(output)}
    if sys.prefix != sys.base_prefix:  # the interpreter behind the link does not know its venv
        params["argv"] = ["/bin/sh", "-c", 'exec "$@"', "sh", sys.executable, *params["argv"][1:]]
    [stored] = daemon.client.submit({"stage": "external", "params": params})

    def at(step: int) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            job = dict(daemon.client.job(stored["id"]))
            assert job["state"] in ("queued", "starting", "running"), (job, daemon.client.log(stored["id"]).data)
            return job if job["step"] == step and job["loss"] is not None else None

        return wait_for(look, LIMIT_S, f"step {step}")

    first = at(4)
    assert (first["steps"], first["epoch"], first["epochs"], first["unit"]) == (12, 0, 2, "steps")
    assert 3 < first["loss"] < 6 and first["lr"] > 0
    (gates / "4").touch()
    second = at(8)
    assert (second["epoch"], second["eta_s"] is not None) == (1, True)
    assert [one["epoch"] for one in second["epochs_done"]] == [0]
    judged = wait_for(lambda: daemon.client.checkpoints(stored["id"]), LIMIT_S, "a checkpoint")
    assert (Path(judged[0]["path"]).name, judged[0]["step"]) == ("checkpoint-6", 6)
    (gates / "8").touch()
    ended = daemon.wait_ended(stored["id"], LIMIT_S)
    assert ended["state"] == "succeeded", (ended, daemon.client.log(stored["id"]).data.decode())
    assert [one["val"]["loss"] > 0 for one in ended["epochs_done"]] == [True, True]
    checkpoints = {Path(one["path"]).name: one for one in daemon.client.checkpoints(stored["id"])}
    assert {name: one["verdict"] for name, one in checkpoints.items()} == {
        "checkpoint-6": "valid",
        "checkpoint-12": "valid",
    }, checkpoints
    assert "not_a_drafter" in [finding["code"] for finding in checkpoints["checkpoint-6"]["findings"]]


@pytest.mark.parametrize("progress", ["auto", {"regex": TOLD}], ids=["auto", "regex"])
def test_a_script_that_prints_lines(daemon: Any, place: Path, wait_for: Any, progress: Any) -> None:
    argv = [PYTHON, "-c", SCRIPT, str(place / "gates")]
    [stored] = daemon.client.submit({"stage": "external", "params": {"argv": argv, "progress": progress}})
    for step in (2, 5, 9):
        job = wait_for(lambda step=step: (now := daemon.client.job(stored["id"]))["step"] == step and now)
        assert (job["steps"], job["epochs"], job["epoch"]) == (12, 2, step // 7)
        (place / "gates" / str(step)).touch()
    assert job["eta_s"] is not None and job["loss"] == 6 - 9 / 4
    ended = daemon.wait_ended(stored["id"])
    assert (ended["state"], ended["step"]) == ("succeeded", 12)
    assert [one["epoch"] for one in ended["epochs_done"]] == [0, 1]


def test_checkpoints_are_judged_and_a_bad_one_is_told(daemon: Any, place: Path) -> None:
    good, bad = make_checkpoint(place / "made" / "0", 1.0), make_checkpoint(place / "made" / "1", float("nan"))
    torn = make_checkpoint(place / "made" / "2", 3.0)
    whole = (torn / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    script = 'mkdir c && cp -r "$1" "$2" "$3" c/ && cp -r "$1" c/3.tmp'
    job = run(daemon, script, str(good), str(bad), str(torn), watch="c")
    assert job["state"] == "succeeded"
    verdicts = {Path(one["path"]).name: one for one in daemon.client.checkpoints(job["id"])}
    assert {name: (one["verdict"], one["epoch"]) for name, one in verdicts.items()} == {
        "0": ("valid", 0),
        "1": ("invalid", 1),
        "2": ("unreadable", 2),
    }
    assert "not_finite" in [finding["code"] for finding in verdicts["1"]["findings"]]
    assert warnings_of(job).count("invalid_checkpoint") == 2


def test_a_program_is_stopped_for_a_bad_checkpoint_when_asked(daemon: Any, place: Path) -> None:
    bad = make_checkpoint(place / "made", float("inf"))
    script = 'cp -r "$1" "$EYAS_OUTPUT_DIR/5"; trap "echo told; exit 0" TERM; while :; do sleep 0.1; done'
    job = run(daemon, script, str(bad), on_invalid_checkpoint="stop")
    assert (job["state"], job["reason"]) == ("failed", "invalid_checkpoint")
    assert "NaN" in job["cause"]
    assert b"told" in daemon.client.log(job["id"]).data


def test_a_loss_that_is_not_finite_is_told_or_stops(daemon: Any) -> None:
    job = run(daemon, "echo epoch 1/2 step 1/4 loss 3; echo epoch 1/2 step 2/4 loss nan")
    assert (job["state"], job["loss"], warnings_of(job)) == ("succeeded", None, ["nonfinite_loss"])
    script = 'echo step 1 loss nan; trap "exit 0" TERM; while :; do sleep 0.1; done'
    job = run(daemon, script, on_nonfinite_loss="stop")
    assert (job["state"], job["reason"]) == ("failed", "diverged")


def test_fault_16_the_log_of_a_program_may_hold_anything(daemon: Any) -> None:
    script = (
        "import os, sys; out = sys.stdout.buffer\n"
        "for _ in range(50): out.write(b'x' * (1 << 20))\n"
        "out.write(b'\\n' + bytes(range(256)) * 100 + b'\\n')\n"
        "for n in range(200001): out.write(b'\\r%3d%%|#| %d/200000 [00:01<00:01, 9.0it/s]' % (n // 2000, n))\n"
        "out.write(b'\\nepoch 1/1 step 7/7 loss 1.5')\n"
    )
    [stored] = daemon.client.submit({"stage": "external", "params": {"argv": [PYTHON, "-c", script]}})
    job = daemon.wait_ended(stored["id"], LIMIT_S)
    assert (job["state"], job["step"], job["steps"], job["loss"]) == ("succeeded", 7, 7, 1.5)
    record = json.loads((daemon.attempt(job["id"]) / "exit.json").read_text())
    assert record["rusage"]["max_rss_bytes"] < 150 << 20
    assert len(list(daemon.client.events(job["id"]))) < 60


def test_paths_to_watch(daemon: Any, place: Path) -> None:
    for watch, status in (("../up", 422), ("/etc", 403), (str(place / "later"), 201), ("not/yet", 201)):
        request = {"stage": "external", "params": {"argv": ["/bin/sh", "-c", "true"], "watch": watch}}
        if status == 201:
            assert daemon.wait_ended(daemon.client.submit(request)[0]["id"])["state"] == "succeeded"
            continue
        with pytest.raises(ApiError) as refused:
            daemon.client.submit(request)
        assert (refused.value.status, refused.value.fields[0]["pointer"]) == (status, "/params/watch")


class Started:
    """A process somebody started with nohup."""

    def __init__(self, place: Path, *command: str) -> None:
        self.log = place / "train.log"
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                ["nohup", *command], stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=place
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start(place: Path) -> Iterator[Any]:
    started: list[Started] = []

    def make(*command: str) -> Started:
        started.append(Started(place, *command))
        return started[-1]

    yield make
    for one in started:
        one.end()


def eyas(daemon: Any, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = daemon.command(*arguments, "--state", str(daemon.state))
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_process_started_with_nohup_is_adopted_and_watched_to_its_end(
    daemon: Any, place: Path, start: Any, wait_for: Any
) -> None:
    make_checkpoint(place / "checkpoints" / "0", 1.0)
    theirs = start(PYTHON, "-c", SCRIPT, str(place / "gates"))
    wait_for(lambda: b"step 2/12" in theirs.log.read_bytes())
    answer = eyas(daemon, "adopt", "--pid", str(theirs.pid), "--watch", str(place / "checkpoints"), "--json")
    assert answer.returncode == 0, answer.stderr
    job_id = json.loads(answer.stdout)["id"]
    job = wait_for(lambda: (now := daemon.client.job(job_id))["step"] == 2 and now)
    assert job["params"]["log"] == str(theirs.log)
    assert job["params"]["start_ticks"] == start_ticks(theirs.pid)
    (place / "gates" / "2").touch()
    wait_for(lambda: daemon.client.job(job_id)["step"] == 5)
    daemon.kill()
    (place / "gates" / "5").touch()
    make_checkpoint(place / "checkpoints" / "1", 2.0)
    daemon.start()
    job = wait_for(lambda: (now := daemon.client.job(job_id))["step"] == 9 and now)
    assert (job["state"], job["epoch"], job["steps"], job["eta_s"] is not None) == ("running", 1, 12, True)
    (place / "gates" / "9").touch()
    theirs.process.wait(60)
    ended = daemon.wait_ended(job_id, LIMIT_S)
    assert (ended["state"], ended["attempt"], ended["step"]) == ("succeeded", 1, 12)
    assert warnings_of(ended) == ["exit_code_unknown"]
    assert ended["result"]["data"]["exit_code"] is None
    verdicts = [(Path(one["path"]).name, one["verdict"]) for one in daemon.client.checkpoints(job_id)]
    assert sorted(verdicts) == [("0", "valid"), ("1", "valid")]


@pytest.mark.parametrize(
    ("script", "reason", "cause"),
    [
        ("echo 'torch.OutOfMemoryError: CUDA out of memory.'", "out_of_gpu_memory", "torch.OutOfMemoryError"),
        ("printf 'Traceback (most recent call last):\\n  x\\nValueError: bad\\n'", "internal_error", "ValueError: bad"),
        ("for n in 1 2 3; do echo epoch 1/1 step $n/10 loss 2; done", "internal_error", "ended at step 3 of 10"),
    ],
    ids=["signature", "traceback", "unfinished"],
)
def test_an_adopted_process_that_failed(
    daemon: Any, place: Path, start: Any, script: str, reason: str, cause: str
) -> None:
    gate = place / "gates" / "go"
    theirs = start("/bin/sh", "-c", f"while [ ! -e {gate} ]; do sleep 0.05; done; {script}")
    [stored] = daemon.client.submit({"stage": "adopt", "params": {"pid": theirs.pid}})
    daemon.wait_state(stored["id"], "running")
    gate.touch()
    theirs.process.wait(60)
    job = daemon.wait_ended(stored["id"], LIMIT_S)
    assert (job["state"], job["reason"]) == ("failed", reason), job
    assert cause in job["cause"]


def test_cancel_ends_the_watching_and_nothing_else(daemon: Any, place: Path, start: Any) -> None:
    theirs = start("sleep", "1000")
    [stored] = daemon.client.submit({"stage": "adopt", "params": {"pid": theirs.pid}})
    daemon.wait_state(stored["id"], "running")
    with pytest.raises(ApiError) as refused:
        daemon.client.pause(stored["id"])
    assert refused.value.status == 409
    daemon.client.cancel(stored["id"], grace_s=0)
    assert daemon.wait_ended(stored["id"])["state"] == "cancelled"
    assert theirs.process.poll() is None


def test_a_process_that_takes_no_slot(new_daemon: Any, tmp_path: Path) -> None:
    daemon = new_daemon(EYAS_EXTERNAL_PROGRAMS=json.dumps(["/bin/sh"]), EYAS_MAX_RUNNING="1")
    theirs = Started(daemon.root, "sleep", "1000")
    try:
        [busy] = daemon.client.submit({"stage": "external", "params": {"argv": ["/bin/sh", "-c", "sleep 1000"]}})
        daemon.wait_state(busy["id"], "running")
        [watching] = daemon.client.submit({"stage": "adopt", "params": {"pid": theirs.pid}})
        daemon.wait_state(watching["id"], "running")
    finally:
        theirs.end()
    ended = daemon.wait_ended(watching["id"])
    assert (ended["state"], warnings_of(ended)) == ("succeeded", ["exit_code_unknown"])


def test_processes_that_cannot_be_adopted(daemon: Any, place: Path, start: Any) -> None:
    [ours] = daemon.client.submit({"stage": "external", "params": {"argv": ["/bin/sh", "-c", "sleep 1000"]}})
    daemon.wait_state(ours["id"], "running")
    stage = json.loads((daemon.attempt(ours["id"]) / "process.json").read_text())["stage"]["pid"]
    theirs = start("sleep", "1000")
    gone = subprocess.Popen(["true"])
    gone.wait()
    hidden = subprocess.Popen(["sleep", "1000"], stdout=subprocess.PIPE)
    try:
        for params, field, words in (
            ({"pid": gone.pid}, "pid", "there is no process"),
            ({"pid": stage}, "pid", f"belongs to job {ours['id']}"),
            ({"pid": daemon.pid}, "pid", "is this daemon"),
            ({"pid": 2}, "pid", "thread of the kernel"),
            ({"pid": theirs.pid, "start_ticks": 5}, "pid", "another one by now"),
            ({"pid": hidden.pid}, "log", "name its log"),
            ({"pid": theirs.pid, "log": str(place / "absent.log")}, "log", "does not exist"),
        ):
            with pytest.raises(ApiError) as refused:
                daemon.client.submit({"stage": "adopt", "params": params})
            assert (refused.value.status, refused.value.fields[0]["pointer"]) == (422, f"/params/{field}"), params
            assert words in refused.value.fields[0]["message"]
        with pytest.raises(ApiError) as refused:
            daemon.client.submit({"stage": "adopt", "params": {"pid": theirs.pid, "log": "/etc/passwd"}})
        assert refused.value.status == 403
    finally:
        hidden.kill()
        hidden.communicate()
    daemon.client.cancel(ours["id"], grace_s=0)
    daemon.wait_ended(ours["id"])


def test_a_log_that_is_a_pipe_is_told(daemon: Any, place: Path, start: Any) -> None:
    theirs = start("sleep", "1000")
    os.mkfifo(place / "pipe")
    params = {"pid": theirs.pid, "log": str(place / "pipe")}
    [stored] = daemon.client.submit({"stage": "adopt", "params": params})
    job = daemon.wait_ended(stored["id"])
    assert (job["state"], job["reason"]) == ("failed", "bad_input")
    assert "is no regular file" in job["cause"]


def test_fault_03_a_recycled_pid_is_not_the_adopted_process(daemon: Any, place: Path, start: Any) -> None:
    """The job is held until the process is gone; whoever has its pid by then has another start."""
    theirs = start("sleep", "1000")
    gate = place / "gates" / "go"
    wait = f"while [ ! -e {gate} ]; do sleep 0.05; done"
    chain = [
        {"name": "before", "stage": "external", "params": {"argv": ["/bin/sh", "-c", wait]}},
        {"name": "adopted", "stage": "adopt", "depends_on": ["before"], "params": {"pid": theirs.pid}},
    ]
    jobs = daemon.client.submit({"jobs": chain})
    os.kill(theirs.pid, signal.SIGKILL)
    theirs.process.wait()
    gate.touch()
    ended = daemon.wait_ended(jobs[1]["id"])
    assert (ended["state"], warnings_of(ended)) == ("succeeded", ["exit_code_unknown"])


def test_an_idle_watcher_is_small(daemon: Any, place: Path, start: Any) -> None:
    theirs = start("sleep", "1000")
    [stored] = daemon.client.submit({"stage": "adopt", "params": {"pid": theirs.pid, "watch": str(place)}})
    daemon.wait_state(stored["id"], "running")
    pid = json.loads((daemon.attempt(stored["id"]) / "process.json").read_text())["stage"]["pid"]
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "libtorch" not in maps
    [rss] = [int(line.split()[1]) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in line]
    assert rss < 80_000, rss
    daemon.client.cancel(stored["id"])
    daemon.wait_ended(stored["id"])
