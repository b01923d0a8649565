"""`python -P -m tests.quota DIRECTORY checkpoint|shard BYTES`: save there while larger writes exceed a quota.

A real quota needs a file system of its own. Here a filter of system calls (seccomp) has the kernel answer with EDQUOT.
"""

import ctypes
import errno
import platform
import struct
import sys
from pathlib import Path

from eagle3_core.contract.jobdir import write_whole
from tests import makers

NO_FILTER = 77

_WRITES = {"x86_64": (1, 18), "aarch64": (64, 68)}
"""Numbers of write and pwrite64."""

_LOAD, _EQUAL, _GREATER, _ANSWER = 0x20, 0x15, 0x25, 0x06
_NUMBER, _DESCRIPTOR, _COUNT = 0, 16, 32
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2


def exceed_quota_with_writes_over(limit: int) -> bool:
    """From now on, in this process, writes of more bytes to any file but the standard streams; False: not possible."""
    if platform.machine() not in _WRITES:
        return False
    first, second = _WRITES[platform.machine()]
    program = [
        (_LOAD, 0, 0, _NUMBER),
        (_EQUAL, 1, 0, first),
        (_EQUAL, 0, 4, second),
        (_LOAD, 0, 0, _DESCRIPTOR),
        (_GREATER, 0, 2, 2),
        (_LOAD, 0, 0, _COUNT),
        (_GREATER, 1, 0, limit),
        (_ANSWER, 0, 0, _ALLOW),
        (_ANSWER, 0, 0, _ERRNO | errno.EDQUOT),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    whole = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    return not (libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, whole, 0, 0))


def main(place: Path, what: str, limit: int) -> None:
    """Save, and print what comes of it."""
    if not exceed_quota_with_writes_over(limit):
        sys.exit(NO_FILTER)
    try:
        if what == "checkpoint":
            makers.write_drafter(place, 1, steps=2, extra={"position": {}})
        else:
            write_whole(place / "shard", bytes(2 * limit))
    except OSError as error:
        sys.stdout.write(f"{error}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
