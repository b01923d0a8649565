"""Work that gives way to a training on the same machine. Standard library only."""

import contextlib
import os
import threading

NICE = 19


def be_nice() -> None:
    """Have the calling thread, and those it starts, go behind all others."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def step_back() -> None:
    """Have a whole process run only where nobody else wants the core; before it starts threads.

    Who is merely nice still gets a turn now and then, and a training whose threads wait for each other waits for the
    one it took the core from. Not for a thread beside a training's own: it would be put aside while it holds the
    interpreter's lock.
    """
    be_nice()
    with contextlib.suppress(OSError):  # some containers do not allow it
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
