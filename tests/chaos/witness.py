"""The program of every job: it tells a file of its own when it truly starts and ends. Standard library only.

python -I -S witness.py FILE KIND SECONDS CODE_ON_TERM
lines: "start ATTEMPT PID", "term ATTEMPT PID", "end CODE ATTEMPT PID", "clash GPU ATTEMPT PID"
"""

import fcntl
import os
import select
import signal
import sys
from pathlib import Path

FILE, KIND, SECONDS, CODE_ON_TERM = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])


def attempt() -> str:
    """The number of the process life, which the stage has as its argument."""
    words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    return Path(words[-1].decode()).name if b"worker.run" in words else "?"


ATTEMPT = attempt()


def note(words: str) -> None:
    """One line, with one write, on disk before going on."""
    descriptor = os.open(FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(descriptor, f"{words} {ATTEMPT} {os.getpid()}\n".encode())
    os.fsync(descriptor)
    os.close(descriptor)


def rest(seconds: float) -> None:
    """time.sleep fails under libfaketime 0.9.10 where only the wall clock is faked."""
    select.select([], [], [], seconds)


def on_term(_number: int, _frame: object) -> None:
    note("term")
    os._exit(CODE_ON_TERM)


def hold_gpus() -> None:
    """A lock for each GPU it was given, held by what it leaves behind as well; one that is held is noted."""
    for gpu in filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")):
        descriptor = os.open(Path(FILE).with_name(f"{gpu}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note(f"clash {gpu}")


def leave_children() -> None:
    """Two sessions of two processes each; one of them is deaf to SIGTERM."""
    for deaf in (False, True):
        if os.fork():
            continue
        os.setsid()
        os.fork()
        signal.signal(signal.SIGTERM, signal.SIG_IGN if deaf else signal.SIG_DFL)
        rest(1000)
        os._exit(0)


def main() -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN if KIND == "deaf" else on_term)
    note("start")
    hold_gpus()
    if KIND == "forking":
        leave_children()
    if KIND != "short":
        rest(SECONDS)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from here on it ends of its own accord
    code = 3 if KIND == "failing" else 0
    try:
        if code == 0:
            Path(os.environ["EYAS_OUTPUT_DIR"], "made").write_text("by the witness\n")
    except OSError as error:  # a full disk: 28
        code = error.errno or 1
    note(f"end {code}")
    return code


if __name__ == "__main__":
    sys.exit(main())
