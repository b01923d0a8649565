"""The end of a log names the cause of a failure: right class, first cause, and nothing made of mere talk."""

import json
import time

import pytest

from eagle3_core.contract.exits import Reason
from server.domain.signatures import END_BYTES, RULES, find_signature
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
