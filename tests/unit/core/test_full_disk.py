"""A disk that fills up, or a quota, in the middle of a save: the file is named, and what was there before is whole."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_core.checkpoint.judge import judge
from eagle3_core.contract.store_files import UNFINISHED
from eagle3_core.data.store import HiddenStateStore
from eagle3_core.data.store_writer import shard_name
from eagle3_core.training.resume import find_latest
from tests import makers, tiny
from tests.quota import NO_FILTER


def saved(parent: Path, epoch: int) -> Path:
    return makers.write_drafter(parent, epoch, steps=epoch + 1, extra={"position": {}})


def test_a_save_that_any_full_disk_interrupts_leaves_the_one_before_as_the_latest(small_disk):
    disk = small_disk(4 << 20)
    first = saved(disk.path, 0)
    size = sum(file.stat().st_blocks * 512 for file in first.iterdir())
    named = set()
    for part in range(8):
        disk.fill(leave=size * part // 8)
        with pytest.raises(OSError, match=r"No space left|full") as caught:
            saved(disk.path, 1)
        assert caught.value.errno == errno.ENOSPC
        named.add(Path(str(caught.value.filename)).name)
        disk.empty()
        assert [path.name for path in disk.path.iterdir()] == ["0"], "nothing half written is left"
        assert find_latest(disk.path)[0].path == first
        assert judge(first).usable
    assert len(named) > 1, named
    assert find_latest(saved(disk.path, 1).parent)[0].step == 2


def test_a_shard_that_a_full_disk_interrupts_is_no_store(small_disk, tmp_path):
    disk = small_disk(1 << 20)
    verifier = tiny.make_verifier(tmp_path / "verifier")
    disk.fill(leave=200_000)
    with pytest.raises(OSError, match=r"No space left on device: '.*/store/shard_0000\d\.safetensors'") as caught:
        tiny.make_store(disk.path / "store", verifier, rows=100)
    assert caught.value.errno == errno.ENOSPC
    left = sorted(path.name for path in (disk.path / "store").iterdir())
    assert left == [*(shard_name(number) for number in range(len(left) - 1)), UNFINISHED]
    whole = {name: (disk.path / "store" / name).stat().st_ino for name in left[:-1]}
    disk.empty()
    finished = tiny.make_store(disk.path / "store", verifier, rows=100)
    at_once = tiny.make_store(tmp_path / "at_once", verifier, rows=100)
    for path in finished.iterdir():
        assert path.read_bytes() == (at_once / path.name).read_bytes()
        assert whole.get(path.name, path.stat().st_ino) == path.stat().st_ino, "what was there is not written again"
    assert len(HiddenStateStore(finished)) == 100


@pytest.mark.parametrize(("what", "limit"), [("checkpoint", 4_000), ("shard", 65_536)])
def test_a_quota_is_a_full_disk_too(tmp_path, what, limit):
    """The kernel itself answers large writes with errno 122, whichever library makes them."""
    saved(tmp_path, 0)
    command = [sys.executable, "-P", "-m", "tests.quota", str(tmp_path), what, str(limit)]
    root = Path(__file__).parents[3]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}
    )
    if done.returncode == NO_FILTER:
        pytest.skip("the kernel takes no filter of system calls here")
    assert done.stdout.startswith(f"[Errno {errno.EDQUOT}] "), done.stdout + done.stderr
    assert os.strerror(errno.EDQUOT) in done.stdout
    assert Path(done.stdout.rpartition(": ")[2].strip("'\n")).name in ("model.safetensors", "shard")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0"]
    assert find_latest(tmp_path)[0].path.name == "0"
