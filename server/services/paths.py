"""Which paths a job may name: absolute, inside the roots after following links, there when read, free when written."""

from collections.abc import Collection, Mapping
from pathlib import Path

from eagle3_core.contract.jobdir import MARKER_NAME
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

    def unreadable(self, path: str, coming: Collection[Path]) -> str | None:
        """Why an input cannot be used, or None. `coming` are output directories that will exist by then."""
        if not Path(path).is_absolute():
            return f"{path} is not an absolute path"
        real = resolve(path)
        if real.exists() or any(real.is_relative_to(directory) for directory in coming):
            return None
        missing = next((str(parent) for parent in reversed(real.parents) if not parent.exists()), None)
        return f"{path} does not exist" + (f" (nor does {missing})" if missing else "")

    def unwritable(self, path: str, claimed: Mapping[Path, str]) -> str | None:
        """Why an output directory cannot be used, or None. `claimed` are those of unfinished jobs."""
        if not Path(path).is_absolute():
            return f"{path} is not an absolute path"
        real = resolve(path)
        if real.is_relative_to(self._jobs) or self._state.is_relative_to(real):
            return f"{path} belongs to the daemon; leave output_dir out to use the job's own directory"
        if real in claimed:
            return f"{path} is the output directory of {claimed[real]}"
        if real.exists() and not real.is_dir():
            return f"{path} is not a directory"
        if real.is_dir() and any(real.iterdir()):
            marker = real / MARKER_NAME
            whose = f"the output of job {marker.read_text().strip()[:64]}" if marker.is_file() else "other files"
            return f"{path} is occupied: it holds {whose}; empty it or name another"
        return None


def resolve(path: str | Path) -> Path:
    """The path with every link followed, as far as it exists."""
    return Path(path).resolve()


def path_error(pointer: str, message: str | None) -> list[FieldError]:
    """A finding as the errors of a field."""
    return [] if message is None else [FieldError(pointer, message)]
