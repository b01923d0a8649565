"""Memory that is given back.

glibc gives each thread that allocates an arena of its own, up to eight for each core, and each keeps what it once took.
Here a dozen threads read logs and events in turn. Measured with ten streams of megabytes that nobody reads: the daemon
grows by 80 MB, with two arenas by 12, at the same speed.
"""

import ctypes

_M_ARENA_MAX = -8  # <malloc.h>


def share_arenas() -> None:
    """Have all threads use two arenas; before any is started, and where the C library knows the word."""
    try:
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)
    except AttributeError:
        return
