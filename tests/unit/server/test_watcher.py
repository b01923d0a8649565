"""The daemon's side of the collector, with programs that misbehave in its place."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from server.domain.resources import GIB, GpuRef
from server.domain.sample import GpuProcess, GpuSample, HostSample, NvmlState, Sample, blocked_by
from server.services import hardware, leases
from server.services.hardware import Hardware
from server.services.leases import Leases
from server.settings import Settings
from server.system import watcher
from server.system.watcher import Watcher


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, seconds in (("DEADLINE_S", 0.3), ("FIRST_PAUSE_S", 0.05), ("DEATH_S", 0.1), ("TURN_S", 0.05)):
        monkeypatch.setattr(watcher, name, seconds)


def run(program, on_line=lambda line: True):
    made = Watcher([sys.executable, "-I", "-S", "-c", program], on_line)
    made.look_every(0.1)
    made.start()
    return made


def test_lines_come_whole_and_the_pace_is_told(wait_for):
    lines = []
    program = "import sys\nfor line in sys.stdin: print('x' * 100_000 + line.strip(), flush=True)"
    made = run(program, lambda line: bool(lines.append(line)) or True)
    try:
        wait_for(lambda: lines)
        made.look_every(7.5)
        wait_for(lambda: lines[-1].endswith(b"7.5"))
        assert {len(line) for line in lines} == {100_003}
    finally:
        made.stop()


@pytest.mark.parametrize("program", ["", "import time; time.sleep(60)", "raise SystemExit(3)"])
def test_one_that_ends_or_is_silent_is_replaced_with_longer_and_longer_pauses(monkeypatch, wait_for, program):
    started = []
    popen = subprocess.Popen

    def count(*arguments, **named):
        started.append(watcher.clock.boottime())
        return popen(*arguments, **named)

    monkeypatch.setattr(watcher, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": count}))
    made = run(program)
    try:
        wait_for(lambda: len(started) >= 5)
    finally:
        made.stop()
    assert started[4] - started[3] >= 0.4 - 0.05  # 0.05 doubled thrice


def test_one_that_does_not_die_is_left_and_one_further_is_started_never_more(monkeypatch, wait_for):
    """A process that hangs in the kernel takes no signal; these processes only look so."""
    real = []

    class Undying(subprocess.Popen):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            real.append(self)

        def kill(self):
            return None

    monkeypatch.setattr(watcher, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": Undying}))
    made = run("import time; time.sleep(600)")
    try:
        wait_for(lambda: made.left_behind == 2)
        seen = len(real)
        assert seen == 2
        subprocess.Popen.kill(real[0])
        wait_for(lambda: len(real) == 3, what="another one, once the first is gone")
    finally:
        made.stop()
        for process in real:
            subprocess.Popen.kill(process)
            process.wait()


def test_a_line_that_is_no_sample_is_an_error_and_no_end(tmp_path, caplog):
    one = Hardware(Settings(state=tmp_path), lambda: None)
    for line in (b"", b"{}", b"[1]", b"\xff", b'{"boottime_s": "x"}'):
        assert not one.take(line)
    assert one.sample is None
    assert one.gpus_unknown() == "GPUs and host have not been looked at yet"
    assert "something else" in caplog.text


def test_what_is_known_grows_old(tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(hardware.clock, "boottime", lambda: now)
    one = Hardware(Settings(state=tmp_path), lambda: None)
    now += 60
    assert one.not_fresh() == "the collector of GPU and host metrics has not answered for 60 s"


def test_a_lease_ends_when_the_last_process_of_its_attempt_is_gone(monkeypatch):
    alive, now = {"j1"}, 100.0
    rows = [leases.Lease("GPU-0", "j1", 1)]

    class Database:
        def read(self):
            return self

        write = read

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(leases.lease_queries, "every", lambda _: list(rows))
    monkeypatch.setattr(leases.lease_queries, "release", lambda _, *attempt: rows.clear())
    monkeypatch.setattr(leases.process, "any_marked", lambda job_id: job_id in alive)
    monkeypatch.setattr(leases.clock, "boottime", lambda: now)
    held = Leases(SimpleNamespace(database=Database()))
    held.load()
    queued = SimpleNamespace(id="j1", state="queued", attempt=None)
    assert not held.release({"j1": queued})
    assert held.ending({"j1": queued}) == {"j1": "processes of its last attempt are still ending"}
    alive.clear()
    assert not held.release({})  # looked at a moment ago
    now += 2
    assert held.release({})
    assert held.holders == {}


@pytest.mark.parametrize("damage", ["", "[]", '{"gpus": [1]}', '{"gpus": 3}', "{}"])
def test_a_damaged_resources_file_names_itself(tmp_path, caplog, damage):
    attempt = leases.AttemptDir(tmp_path)
    ref = GpuRef(index="0", uuid="GPU-0", name=None)
    leases.write_resources(attempt, [ref])
    assert leases.read_resources(attempt) == (ref,)
    attempt.resources.write_text(damage)
    assert leases.read_resources(attempt) == ()
    assert str(attempt.resources) in caplog.text


def gpu_sample(*processes, used=0, **changes):
    fields = dict.fromkeys(GpuSample.model_fields)
    fields |= {"index": 0, "uuid": "GPU-0", "mig": False, "memory_used": used, "reasons": {}, "processes": processes}
    return GpuSample(**{**fields, **changes})


def on_gpu(memory, user="eve", job=None, kind="compute"):
    return GpuProcess(pid=7, kind=kind, memory=memory, user=user, foreign_user=user == "eve", job=job)


@pytest.mark.parametrize(
    ("gpu", "holder", "reason"),
    [
        (gpu_sample(used=4 << 20), None, None),
        (gpu_sample(on_gpu(5 * GIB)), None, "used by pid 7 of another user, eve (5.0 GiB)"),
        (gpu_sample(on_gpu(5 * GIB, user="us")), None, "used by pid 7, which is none of a job (5.0 GiB)"),
        (gpu_sample(on_gpu(None, user=None)), None, "used by pid 7, which cannot be seen from here (unknown size)"),
        (gpu_sample(on_gpu(GIB, job="j1")), None, "used by pid 7 of job j1, which does not hold it (1.0 GiB)"),
        (gpu_sample(on_gpu(GIB, job="j1")), "j1", None),
        (gpu_sample(on_gpu(GIB, job="j2")), "j1", "used by pid 7 of job j2, which does not hold it (1.0 GiB)"),
        (gpu_sample(on_gpu(GIB, user=None), used=70 * GIB), "j1", None),  # as from within a container
        (gpu_sample(on_gpu(0), on_gpu(9 * GIB, kind="graphics"), used=9 * GIB), None, None),
        (gpu_sample(used=3 * GIB), None, "used by processes that cannot be seen from here (3.0 GiB)"),
        (gpu_sample(processes=None, used=None), None, None),
        (gpu_sample(lost="GPU is lost"), "j1", "not answering (GPU is lost)"),
    ],
)
def test_what_stands_in_the_way_of_handing_a_gpu_out(gpu, holder, reason):
    assert blocked_by(gpu, holder) == reason


def test_the_loop_is_rung_for_a_look_it_waits_for_and_no_other(tmp_path, monkeypatch):
    now, rung = 1000.0, []
    monkeypatch.setattr(hardware.clock, "boottime", lambda: now)
    one = Hardware(Settings(state=tmp_path), lambda: rung.append(now))
    host = dict.fromkeys(HostSample.model_fields) | {"cpus": 1, "disks": [], "reasons": {}}
    nvml = dict.fromkeys(NvmlState.model_fields) | {"gpus": [dict(gpu_sample())], "absent": False}

    def look():
        sample = Sample(boottime_s=now, time="2026-01-01T00:00:00Z", nvml=nvml, host=host)
        assert one.take(sample.model_dump_json().encode())

    look()
    assert (rung, one.not_fresh()) == ([1000.0], None)
    now += 8
    look()
    now += 1
    one.look_now()
    assert one.not_fresh() == "the GPUs are being looked at"
    look()
    assert (rung, one.not_fresh()) == ([1000.0, 1009.0], None)
    assert [gpu.uuid for gpu in one.gpus({})] == ["GPU-0"]


def test_a_failed_look_is_not_the_last_one(monkeypatch, wait_for, caplog):
    """Waiting for a collector's end fails once, as it does where no descriptor is free."""
    waits, lines = [], []
    whole = watcher._dies

    def dies(process, seconds):
        waits.append(process)
        if len(waits) == 1:
            raise OSError(24, "Too many open files")
        return whole(process, seconds)

    monkeypatch.setattr(watcher, "_dies", dies)
    made = run("print('a line', flush=True)", lambda line: bool(lines.append(line)) or True)
    try:
        wait_for(lambda: len(waits) >= 3 and len(lines) >= 3)
        wait_for(lambda: made.left_behind == 0)
    finally:
        made.stop()
    assert "it goes on" in caplog.text
