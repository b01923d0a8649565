"""What this host has, without asking anything that may hang."""

import os


def cpu_count() -> int:
    """CPUs this process, and so its jobs, may use."""
    return len(os.sched_getaffinity(0))


def ram_bytes() -> int:
    """Bytes of memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
