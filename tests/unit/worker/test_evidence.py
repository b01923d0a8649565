"""What the shim reads of memory groups, the kernel's log and shared memory."""

from pathlib import Path

import pytest

from worker.evidence import KernelLog, oom_counter, oom_kills, others_in_group, shared_memory_free


def group(tmp_path, membership, file, text):
    (tmp_path / "membership").write_text(membership)
    place = tmp_path / "groups" / file
    place.parent.mkdir(parents=True)
    place.write_text(text)
    return oom_counter(tmp_path / "groups", tmp_path / "membership")


V2 = "low 0\nhigh 7\nmax 3\noom 2\noom_kill 2\noom_group_kill 0\n"
V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"


@pytest.mark.parametrize(
    ("membership", "file", "text", "kills"),
    [
        ("0::/jobs/a\n", "jobs/a/memory.events", V2, 2),
        ("4:memory:/x\n0::/jobs/a\n", "unified/jobs/a/memory.events", V2, 2),
        ("0::/host/path\n", "memory.events", V2, 2),
        ("4:memory:/jobs/a\n0::/\n", "memory/jobs/a/memory.oom_control", V1, 3),
        ("4:cpu,memory:/docker/abc\n", "memory/memory.oom_control", V1, 3),
        ("4:cpu:/a\n", "a/other", V1, None),
        ("nonsense", "a/other", V1, None),
        ("0::/a\n", "a/memory.events", "oom_kill many\n", None),
    ],
)
def test_the_counter_of_the_own_group(tmp_path, membership, file, text, kills):
    assert oom_kills(group(tmp_path, membership, file, text)) == kills


def test_whether_others_share_the_group(tmp_path):
    (tmp_path / "cgroup.procs").write_text("41\n42\n")
    assert not others_in_group(tmp_path / "memory.events", {41, 42, 43})
    assert others_in_group(tmp_path / "memory.events", {41})
    assert others_in_group(tmp_path / "absent" / "memory.events", {41})
    assert not others_in_group(None, set())


def test_no_membership_no_counter(tmp_path):
    assert oom_counter(tmp_path, tmp_path / "absent") is None


@pytest.mark.skipif(
    str(Path("/proc/self/ns/pid").readlink()) != "pid:[4026531836]", reason="pids here are not the kernel's"
)
@pytest.mark.parametrize(
    ("record", "found"),
    [
        ("3,100,5,-;Out of memory: Killed process 41 (python) total-vm:1kB\n", True),
        ("6,100,5,-;oom-kill:constraint=CONSTRAINT_NONE,task=python,pid=41,uid=0\n", True),
        ("3,100,5,-;Out of memory: Killed process 411 (python) total-vm:1kB\n", False),
        ("6,100,5,-;usb 1-1: new device 41\n", False),
    ],
)
def test_the_kernels_log_names_the_process(tmp_path, record, found):
    file = tmp_path / "kmsg"
    file.write_text("3,1,1,-;Out of memory: Killed process 41 (earlier)\n")
    log = KernelLog(str(file))
    with file.open("a") as kernel:
        kernel.write(record)
    line = log.kill_of(41)
    assert (line is not None) == found
    assert not found or line in record


def test_a_kernels_log_that_may_not_be_read(tmp_path):
    assert KernelLog(str(tmp_path / "absent")).kill_of(1) is None


def test_shared_memory(tmp_path):
    free, total = shared_memory_free(str(tmp_path))
    assert 0 <= free <= total
    assert shared_memory_free(str(tmp_path / "absent")) is None
