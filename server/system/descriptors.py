"""How many files and connections the daemon may have open at once."""

import resource

_FIRST = resource.getrlimit(resource.RLIMIT_NOFILE)

ENOUGH = 16_384


def raise_limit() -> int:
    """Take as many descriptors as the process may have, within reason; returns how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return ENOUGH if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def give_first_limit(pid: int) -> None:
    """Give a process that was just started the limit the daemon was started with: programs that use select() rely on
    no descriptor being over 1023.
    """
    try:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, _FIRST)
    except (ProcessLookupError, PermissionError):
        return  # it has ended already
