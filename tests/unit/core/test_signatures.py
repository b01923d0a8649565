"""The end of a log names the cause of a failure: right class, first cause, and nothing made of mere talk."""

import json
import time
from datetime import UTC, datetime

import pytest

from eagle3_core.contract.exits import ExitCode, Reason
from eagle3_core.contract.signatures import END_BYTES, RULES, find_signature
from server.domain.advance import finish
from server.domain.job import Attempt, Job
from server.domain.outcome import End, ExitRecord
from server.domain.progress import StageError, Status
from server.domain.states import AttemptState, JobState
from tests.cases import make_case

EXPECTED = {
    "oom": ("gpu_memory", Reason.OUT_OF_GPU_MEMORY),
    "shm": ("shared_memory", Reason.SHARED_MEMORY_EXHAUSTED),
    "nccl": ("collective", Reason.COLLECTIVE_FAILED),
    "disk": ("disk", Reason.DISK_FULL),
    "quota": ("quota", Reason.DISK_FULL),
    "nfs": ("stale_file_handle", Reason.STORAGE_FAILED),
    "sighup": ("hangup", Reason.KILLED_BY_SIGNAL),
    "none": None,
}
WATCHDOG = (
    "[E602 11:17:52.1850 ProcessGroupNCCL.cpp:632] [Rank 5] Watchdog caught collective operation timeout: WorkNCCL("
)


def classify(*lines):
    found = find_signature("\n".join(lines).encode())
    return None if found is None else found.kind.word


def test_case_j08_names_the_cause_of_each_log(tmp_path):
    case = make_case("J08", tmp_path)
    expected = json.loads((case / "expected.json").read_text())
    assert len(expected) == 12
    for name, word in expected.items():
        found = find_signature((case / f"{name}.log").read_bytes())
        assert (found and (found.kind.word, found.kind.reason)) == EXPECTED[word], name


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.kind.word}-{rule.example[:40]}")
def test_each_rule_finds_its_example_and_only_where_a_message_begins(rule):
    for line in (rule.example, f"[rank3]: {rule.example}", f"2026-01-02 03:04:05,678 {rule.example}\r"):
        found = find_signature(f"step 8 loss 2.1\n{line}\n".encode())
        assert found is not None
        assert found.kind == rule.kind
    for talk in (f"user asked: why {rule.example}", f'{{"content": "{rule.example}"}}', f"> {rule.example}"):
        assert find_signature(talk.encode()) is None


def test_the_first_cause_counts_and_not_its_echo():
    oom = "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    nccl = "[rank0]:" + WATCHDOG
    full = "OSError: [Errno 28] No space left on device"
    assert classify("step 8 loss 2.1", oom, nccl, full) == "gpu_memory"
    assert classify(nccl, oom) == "collective"
    assert (
        classify(full, "During handling of the above exception, another exception occurred:", "KeyError: 'x'") == "disk"
    )


def test_an_error_the_program_survived_is_not_the_cause():
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert classify(oom, "batch size is now 4", "step 9 loss 2.0", "ValueError: bad row") is None
    assert classify(oom, "epoch 1: train loss 2.0", oom) == "gpu_memory"
    missing = "ModuleNotFoundError: No module named 'apex'"
    assert classify(missing, "going on without apex", "ValueError: bad row") is None
    assert classify("Traceback (most recent call last):", missing, "") == "module"


def test_a_message_behind_a_progress_bar_is_found():
    bar = "  1%|#         | 24/1752 [01:08<1:22:56,  2.88s/it]"
    message = "[rank5]:" + WATCHDOG
    assert classify(bar + message) == "collective"
    assert classify(bar + "\rRuntimeError: CUDA out of memory. Tried") == "gpu_memory"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "KeyError: 'layers'",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "RuntimeError: run_func_(...) API call failed",
        "Process finished with exit code 137",
        "INFO: memory 40 GiB, out of memory budget 0",
        "checking for errors: none",
        "loss: nan",
    ],
)
def test_the_unknown_stays_unknown(line):
    assert classify("step 8 loss 2.1", line) is None


def test_odd_bytes_and_long_lines_cost_little():
    started = time.process_time()
    assert find_signature(b"\xff\xfe\x00" * 50_000) is None
    for filler in (
        b"a" * 200_000,
        b"[" * 200_000,
        b"Error: " * 30_000,
        b"x.y." * 50_000,
        b"1%|" * 60_000,
        b"[a] " * 50_000,
    ):
        assert find_signature(filler) is None
        assert find_signature(filler + b"\nRuntimeError: CUDA out of memory.") is not None
    assert find_signature(b"RuntimeError: CUDA out of memory.\n" + b"-\n" * END_BYTES) is None
    assert time.process_time() - started < 2


NOW = datetime(2026, 1, 1, tzinfo=UTC)
OOM = b"step 8 loss 2.1\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"


def why(log_end, error=None, **record):
    """Reason and cause of a running job that ended like this."""
    job = Job(1, "j", "j", "external", {}, "/o", NOW, JobState.RUNNING, attempt=Attempt(1, AttemptState.RUNNING))
    job = finish(Job(**{**vars(job), "status": Status(error=error)}), End(ExitRecord(**record), log_end=log_end), NOW)
    return job.reason, job.cause


def test_the_log_is_asked_only_where_the_stage_does_not_know():
    failed = int(ExitCode.PROGRAM_FAILED)
    said = StageError(exit_code=failed, cause="/bin/x exited with code 1 of its own accord")
    reason, cause = why(OOM + b"error: " + said.cause.encode() + b"\n", said, code=failed)
    assert reason == Reason.OUT_OF_GPU_MEMORY
    assert cause == f"{OOM.decode().splitlines()[1]}; {said.cause}"
    assert why(b"nothing\n", said, code=failed) == (Reason.INTERNAL_ERROR, said.cause)
    assert why(OOM, code=1)[0] == Reason.OUT_OF_GPU_MEMORY
    known = StageError(exit_code=3, cause="row 7 is damaged")
    assert why(OOM, known, code=3) == (Reason.BAD_DATA, "row 7 is damaged")
    bug = StageError(exit_code=1, cause="RuntimeError: CUDA error: out of memory")
    log = b"Traceback (most recent call last):\nRuntimeError: CUDA error: out of memory\nerror: " + bug.cause.encode()
    assert why(log, bug, code=1) == (Reason.OUT_OF_GPU_MEMORY, bug.cause)


def test_a_signal_counts_unless_the_process_raised_it_itself():
    watchdog = f"[rank0]:{WATCHDOG}".encode()
    reason, cause = why(watchdog, signal="SIGABRT")
    assert reason == Reason.COLLECTIVE_FAILED
    assert cause.endswith("; killed by SIGABRT")
    assert why(watchdog, signal="SIGKILL") == (Reason.KILLED_BY_SIGNAL, "killed by SIGKILL")
    assert why(b"", signal="SIGABRT") == (Reason.KILLED_BY_SIGNAL, "killed by SIGABRT")
