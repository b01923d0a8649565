"""Programs of the operator's choice: which may run, how their end is told, what they leave."""

import json
import signal
from pathlib import Path

import pytest

from client.http import ApiError
from eagle3_core.contract.identity import start_ticks
from tests.cases import make_case
from tests.integration.conftest import open_files

SHELL = "/bin/sh"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory, daemon_class):
    place = tmp_path_factory.mktemp("external")
    root = place / "root"
    root.mkdir()
    made = daemon_class(place / "state", root, {"EYAS_EXTERNAL_PROGRAMS": json.dumps([SHELL])}).start()
    yield made
    made.close()


def program(script, *arguments, **params):
    return {"name": "program", "stage": "external", "params": {"argv": [SHELL, "-c", script, *arguments], **params}}


def run(daemon, script, *arguments, **params):
    [stored] = daemon.client.submit(program(script, *arguments, **params))
    return daemon.wait_ended(stored["id"])


def log_of(daemon, job):
    return daemon.client.log(job["id"]).data.decode()


def test_a_program_runs_and_its_outputs_are_artifacts(daemon):
    script = 'echo "$1 and $(pwd)"; test -z "$(cat)" && echo x > "$EYAS_OUTPUT_DIR/made"; echo seen >&2'
    job = run(daemon, script, "sh", "a b;c", expect_outputs=["made"])
    assert job["state"] == "succeeded", job
    assert job["result"]["data"] == {"exit_code": 0}
    assert Path(job["result"]["artifacts"]["made"]).read_text() == "x\n"
    assert f"a b;c and {job['output_dir']}\n" in log_of(daemon, job)
    assert "seen\n" in log_of(daemon, job)
    assert [event["type"] for event in daemon.client.events(job["id"]) if event["type"] == "progress"] == []


def test_what_was_to_be_watched_for_and_never_came_is_told(daemon):
    form = {"regex": "step (?P<step>[0-9]+)"}
    job = run(daemon, "echo step 3; mkdir checkpoint", watch="checkpoints", progress=form)
    assert (job["state"], job["step"]) == ("succeeded", 3)
    [warning] = job["warnings"]
    where = Path(job["output_dir"]) / "checkpoints"
    assert warning["code"] == "no_checkpoint_seen"
    assert warning["message"] == f"no checkpoint appeared in {where}; does the program write elsewhere?"
    assert [one["code"] for one in run(daemon, "echo at 3", progress=form)["warnings"]] == ["no_progress_seen"]
    assert run(daemon, "echo at 3")["warnings"] == []


def test_working_dir(daemon):
    place = daemon.root / "place"
    place.mkdir()
    assert str(place) in log_of(daemon, run(daemon, "pwd", working_dir=str(place)))
    with pytest.raises(ApiError) as refused:
        daemon.client.submit(program("pwd", working_dir=str(daemon.root / "absent")))
    assert refused.value.fields[0]["pointer"] == "/params/working_dir"


@pytest.mark.parametrize("argv", [["/bin/cat", "/etc/passwd"], [SHELL + "x"], ["/bin/../usr/bin/env", "sh"]])
def test_only_programs_the_setting_names_may_run(daemon, argv):
    for request, pointer in (
        ({"stage": "external", "params": {"argv": argv}}, "/params/argv/0"),
        ({"jobs": [program("true"), {"stage": "external", "params": {"argv": argv}}]}, "/jobs/1/params/argv/0"),
    ):
        with pytest.raises(ApiError) as refused:
            daemon.client.submit(request)
        assert (refused.value.status, refused.value.fields[0]["pointer"]) == (403, pointer)
        assert "EYAS_EXTERNAL_PROGRAMS" in str(refused.value)


def test_a_link_to_a_program_that_is_turned_while_the_job_waits_starts_nothing(daemon):
    link, go, ran = (daemon.root / name for name in ("turned", "go", "ran"))
    link.symlink_to(SHELL)
    [first] = daemon.client.submit(program(f"until [ -e {go} ]; do sleep 0.02; done"))
    argv = [str(link), str(ran)]
    [second] = daemon.client.submit({"stage": "external", "params": {"argv": argv}, "depends_on": [first["id"]]})
    link.unlink()
    link.symlink_to("/usr/bin/touch")
    go.touch()
    job = daemon.wait_ended(second["id"])
    assert (job["state"], job["reason"]) == ("failed", "spawn_failed")
    assert "EYAS_EXTERNAL_PROGRAMS" in job["cause"]
    assert not ran.exists()


def test_programs_are_compared_with_links_followed(daemon):
    link = daemon.root / "link"
    link.symlink_to(SHELL)
    [stored] = daemon.client.submit({"stage": "external", "params": {"argv": [str(link), "-c", "true"]}})
    assert daemon.wait_ended(stored["id"])["state"] == "succeeded"


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"argv": []}, "argv"),
        ({"argv": ["sh"]}, "argv"),
        ({"argv": [SHELL, "a\0b"]}, "argv"),
        ({"argv": [SHELL], "expect_outputs": ["../x"]}, "expect_outputs"),
        ({"argv": [SHELL], "expect_outputs": ["/x"]}, "expect_outputs"),
        ({"argv": [SHELL], "expect_outputs": [""]}, "expect_outputs"),
        ({"argv": SHELL}, "argv"),
    ],
)
def test_parameters_that_make_no_sense(daemon, params, field):
    with pytest.raises(ApiError) as refused:
        daemon.client.submit({"stage": "external", "params": params})
    assert refused.value.status == 422
    assert refused.value.fields[0]["pointer"] == f"/params/{field}"


def test_case_i04_signals_and_codes_are_told_apart(daemon, tmp_path):
    case = make_case("I04", tmp_path)
    told = {}
    for name in ("sigkill", "exit137", "exit0_err", "sigterm"):
        [stored] = daemon.client.submit(
            {"stage": "external", "params": {"argv": [SHELL, str(case / f"{name}.sh")], "expect_outputs": ["out.bin"]}}
        )
        told[name] = daemon.wait_ended(stored["id"])
    assert {job["state"] for job in told.values()} == {"failed"}
    assert (told["sigkill"]["reason"], told["sigkill"]["cause"]) == ("killed_by_signal", "killed by SIGKILL")
    assert "memory" in told["sigkill"]["hint"]
    assert (told["sigterm"]["reason"], told["sigterm"]["cause"]) == ("killed_by_signal", "killed by SIGTERM")
    assert told["exit137"]["reason"] == "internal_error"
    assert told["exit137"]["cause"] == f"{SHELL} exited with code 137 of its own accord"
    assert "possibly for want of memory" in told["exit137"]["hint"]
    assert told["exit0_err"]["reason"] == "bad_data"
    assert "out.bin" in told["exit0_err"]["cause"]


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGUSR1, signal.SIGINT])
def test_the_stage_ends_by_the_signal_the_program_ended_by(daemon, number):
    job = run(daemon, f"ulimit -c 0; kill -{int(number)} $$")
    assert (job["reason"], job["cause"]) == ("killed_by_signal", f"killed by {number.name}")


def test_an_ordinary_exit_code_is_the_cause(daemon):
    job = run(daemon, "echo words; exit 3")
    assert (job["state"], job["reason"]) == ("failed", "internal_error")
    assert job["cause"] == f"{SHELL} exited with code 3 of its own accord"
    assert "Traceback" not in log_of(daemon, job)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "out_of_gpu_memory"),
        ("SafetensorError: Error while serializing: I/O error: No space left on device (os error 28)", "disk_full"),
        ("ModuleNotFoundError: No module named 'flash_attn'", "import_error"),
        ("user asked: what does CUDA out of memory mean?", "internal_error"),
    ],
)
def test_the_end_of_the_log_tells_why_a_program_failed(daemon, words, reason):
    job = run(daemon, f'echo "{words}"; exit 1')
    assert job["reason"] == reason
    assert reason == "internal_error" or job["cause"].startswith(words)


def test_a_program_that_cannot_be_started(new_daemon, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    daemon = new_daemon(EYAS_EXTERNAL_PROGRAMS=json.dumps([str(broken)]))
    [stored] = daemon.client.submit({"stage": "external", "params": {"argv": [str(broken)]}})
    job = daemon.wait_ended(stored["id"])
    assert (job["state"], job["reason"]) == ("failed", "bad_input")
    assert str(broken) in job["cause"]


@pytest.mark.parametrize("on_term", ["exit 0", "exit 9", "trap - TERM; kill $$"])
def test_a_stop_is_passed_on_and_waited_for(daemon, on_term, wait_for):
    script = f"trap 'echo told; {on_term}' TERM; echo ready; while :; do sleep 0.02; done"
    [stored] = daemon.client.submit(program(script))
    wait_for(lambda: b"ready" in daemon.client.log(stored["id"]).data)
    daemon.client.cancel(stored["id"])
    job = daemon.wait_ended(stored["id"])
    assert (job["state"], job["reason"]) == ("cancelled", "cancelled_by_user")
    assert "told" in log_of(daemon, job)
    record = json.loads((daemon.attempt(job["id"]) / "exit.json").read_text())
    assert (record["code"], record["killed_after_grace"]) == (75, False)


def test_a_deaf_program_and_its_setsid_children_are_killed(daemon, wait_for):
    script = "trap '' TERM; setsid sleep 1000 & echo child $!; while :; do sleep 0.02; done"
    [stored] = daemon.client.submit(program(script))
    wait_for(lambda: b"child " in daemon.client.log(stored["id"]).data)
    child = int(log_of(daemon, stored).split("child ")[1].split()[0])
    daemon.client.cancel(stored["id"], grace_s=0.2)
    job = daemon.wait_ended(stored["id"])
    assert job["state"] == "cancelled"
    assert "killed when its grace was over" in job["cause"]
    assert start_ticks(child) is None


def test_the_program_cannot_kill_the_stage_by_its_group(daemon):
    assert run(daemon, "kill -9 0")["cause"] == "killed by SIGKILL"
    job = run(daemon, "trap '' TERM; kill -15 0; exit 0")
    assert job["state"] == "succeeded"


def test_the_program_holds_no_lock(daemon, wait_for):
    [stored] = daemon.client.submit(program("echo ready; sleep 1000"))
    wait_for(lambda: b"ready" in daemon.client.log(stored["id"]).data)
    process = json.loads((daemon.attempt(stored["id"]) / "process.json").read_text())
    [child] = Path(f"/proc/{process['stage']['pid']}/task/{process['stage']['pid']}/children").read_text().split()
    assert not any(name.endswith(("/lock", "/events.jsonl")) for name in open_files(int(child)))
    daemon.client.cancel(stored["id"])
    assert daemon.wait_ended(stored["id"])["state"] == "cancelled"
