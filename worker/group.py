"""A control group of the job's own, where one can be made. Standard library only.

    <the shim's memory group (v1) or group (v2)>/eyas-<job id>/

Every process of the stage is in it whatever it does to its environment, session or parent; `proctree` finds them by
the group's name. Its counters tell of this job alone.
"""

import contextlib
from pathlib import Path

from eagle3_core.contract.proctree import GROUP_PREFIX
from worker.evidence import own_groups


class JobGroup:
    """The group of one job, or of none where the system does not allow it: the other ways of finding do then."""

    def __init__(self, job_id: str, parents: list[Path] | None = None) -> None:
        self._name = f"{GROUP_PREFIX}{job_id}"
        # Elsewhere a directory could be made, too, but it would be no group.
        self._parents = [group for group in parents or own_groups() if (group / "cgroup.procs").is_file()]
        self.path = self._make()

    @property
    def counter(self) -> Path | None:
        """The file that counts what the kernel's memory killer did in it."""
        files = [] if self.path is None else [self.path / "memory.oom_control", self.path / "memory.events"]
        return next((file for file in files if file.is_file()), None)

    def take(self, pid: int) -> None:
        """Put a process into the group; those it forks from now on follow."""
        if self.path is not None and not self._put(pid):
            self.path = self._make()  # another shim may have taken the empty group for one that was left behind
            if self.path is None or not self._put(pid):
                self.path = None

    def remove(self) -> None:
        """Take away the group, and empty ones whose shim was killed."""
        for parent in self._parents:
            for group in parent.glob(f"{GROUP_PREFIX}*"):
                with contextlib.suppress(OSError):  # somebody is in it
                    group.rmdir()

    def _put(self, pid: int) -> bool:
        assert self.path is not None
        with contextlib.suppress(OSError):
            (self.path / "cgroup.procs").write_text(str(pid))
            return True
        return False

    def _make(self) -> Path | None:
        for parent in self._parents:
            with contextlib.suppress(OSError):
                (parent / self._name).mkdir(exist_ok=True)
                return parent / self._name
        return None
