"""The harness around a stage."""

import errno
import io
import sys
from pathlib import Path

from eagle3_core.contract.exits import ExitCode
from worker.run import tell_failure


class FullDisk:
    """Events that cannot be written."""

    def write(self, *_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_too_full_for_words_still_gives_its_exit_code(monkeypatch):
    with io.TextIOWrapper(Path("/dev/full").open("wb", buffering=0), write_through=True) as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "stderr", full)
        assert tell_failure(OSError(errno.ENOSPC, "No space left on device"), FullDisk()) == ExitCode.DISK_FULL
        assert tell_failure(KeyError("a bug"), FullDisk()) == ExitCode.INTERNAL_ERROR
        monkeypatch.undo()
