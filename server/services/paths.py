"""Which paths a job may name: absolute, inside the roots after following links, there when read, free when written."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from eagle3_core.contract.access import unusable
from eagle3_core.contract.jobdir import MARKER_NAME
from eagle3_core.contract.params import STAGES
from server.domain.job import Job
from server.errors import FieldError
from server.settings import Settings


class PathRules:
    """The roots of one daemon."""

    def __init__(self, settings: Settings) -> None:
        self._roots = settings.all_roots
        self._state = settings.state
        self._jobs = settings.jobs_dir

    def outside(self, path: str) -> str | None:
        """Why a path may not be named at all, or None."""
        if not Path(path).is_absolute():
            return None
        real = resolve(path)
        if not any(real.is_relative_to(root) for root in self._roots):
            roots = ", ".join(str(root) for root in self._roots)
            return f"{path} lies outside the allowed roots ({roots}); `eyas serve --root DIR` adds one"
        if real.parent == self._state and real.is_file():
            return f"{path} belongs to the daemon"
        return None

    def left_roots(self, job: Job) -> str | None:
        """Which path of a stored job lies outside by now, because of a link changed since, or of other roots."""
        paths = STAGES[job.stage].model_validate(job.params).paths().values()
        return next((fault for _, path in paths if (fault := self.outside(path)) is not None), None)

    def unreadable(self, path: str, coming: Collection[Path]) -> str | None:
        """Why an input cannot be used, or None. `coming` are output directories that will exist by then."""
        if not Path(path).is_absolute():
            return f"{path} is not an absolute path"
        real = resolve(path)
        if (fault := unusable(real, os.R_OK)) is not None:
            return fault
        try:
            if real.exists() or any(real.is_relative_to(directory) for directory in coming):
                return None
            missing = next((str(parent) for parent in reversed(real.parents) if not parent.exists()), None)
        except OSError as error:
            return f"{path} cannot be used: {error.strerror}"
        return f"{path} does not exist" + (f" (nor does {missing})" if missing else "")

    def unwritable(self, path: str, claimed: Mapping[Path, str]) -> str | None:
        """Why an output directory cannot be used, or None. `claimed` are those of unfinished jobs."""
        if not Path(path).is_absolute():
            return f"{path} is not an absolute path"
        real = resolve(path)
        if real.is_relative_to(self._jobs) or self._state.is_relative_to(real):
            return f"{path} belongs to the daemon; leave output_dir out to use the job's own directory"
        for other, whose in claimed.items():
            if real.is_relative_to(other) or other.is_relative_to(real):
                how = "is" if real == other else "lies in" if real.is_relative_to(other) else "holds"
                return f"{path} {how} the output directory of {whose}" + ("" if real == other else f", {other}")
        if (fault := unusable(real, os.W_OK)) is not None:
            return fault
        try:
            return _occupied(path, real)
        except OSError as error:
            return f"{path} cannot be used: {error.strerror}"


def _occupied(path: str, real: Path) -> str | None:
    if Path(path).is_symlink() and not real.exists():
        return f"{path} is a link that leads nowhere"
    if real.exists() and not real.is_dir():
        return f"{path} is not a directory"
    if not real.is_dir() or not any(real.iterdir()):
        return None
    marker = real / MARKER_NAME
    owner = marker.read_text(errors="replace").strip()[:64] if marker.is_file() else None
    whose = "other files" if owner is None else f"the output of job {owner}"
    return f"{path} is occupied: it holds {whose}; empty it or name another"


def resolve(path: str | Path) -> Path:
    """The path with every link followed, as far as it exists; a circle of links is left as it stands."""
    return Path(os.path.realpath(path))


def path_error(pointer: str, message: str | None) -> list[FieldError]:
    """A finding as the errors of a field."""
    return [] if message is None else [FieldError(pointer, message)]
