"""Work that gives way to a training on the same machine. Standard library only.

SCHED_IDLE is no choice: beside a training on all cores such a process gets so little that it would judge a checkpoint
of 9.5 GB for hours. At the lowest niceness it is minutes, and a few percent of the training.
"""

import os
import threading

NICE = 19


def be_nice() -> None:
    """Have the calling thread, and those it starts, go behind all others."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
