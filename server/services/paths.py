"""Which paths a job may name: absolute, inside the roots after following links, there when read, free when written."""

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from eagle3_core.contract.access import unusable
from eagle3_core.contract.jobdir import MARKER_NAME
from eagle3_core.contract.params import ExternalParams, StageParams
from server.errors import FieldError
from server.settings import Settings

MAX_ENTRIES = 1_000_000


class PathRules:
    """The roots of one daemon."""

    def __init__(self, settings: Settings) -> None:
        self._roots = settings.all_roots
        self._state = settings.state
        self._within = [root for root in settings.roots if root != settings.state]

    def outside(self, path: str) -> str | None:
        """Why a path may not be named at all, or None."""
        if not Path(path).is_absolute():
            return None
        real = resolve(path)
        if not self._inside(real):
            roots = ", ".join(str(root) for root in self._roots)
            return f"{path} lies outside the allowed roots ({roots}); `eyas serve --root DIR` adds one"
        if self._is_daemons(real):
            return f"{path} belongs to the daemon"
        return None

    def refused(self, params: StageParams) -> Iterator[tuple[str, str]]:
        """Field and fault of each path that leads out of the roots, by itself or by a link below it."""
        for field, (role, path) in params.paths().items():
            fault = self.outside(path)
            # What lies in the working directory of an allowed program is between it and its operator.
            if fault is None and role == "input" and not isinstance(params, ExternalParams):
                fault = self.foreign_link(path)
            if fault is not None:
                yield field, fault

    def _inside(self, real: Path) -> bool:
        return any(real.is_relative_to(root) for root in self._roots)

    def _is_daemons(self, real: Path) -> bool:
        return real == self._state or (real.parent == self._state and real.is_file())

    def _is_kept(self, real: Path) -> bool:
        """Whether nothing may be written there: it is the state directory, holds it, or lies in it and in no root."""
        if self._state.is_relative_to(real):
            return True
        own = [root for root in self._within if root.is_relative_to(self._state)]
        return real.is_relative_to(self._state) and not any(real.is_relative_to(root) for root in own)

    def foreign_link(self, path: str) -> str | None:
        """Which link below an input leads out of the roots, or None.

        One that ends inside any root is as good as a file: the caches of Hugging Face consist of them.
        """
        left = [resolve(path)]
        seen: set[Path] = set()
        entries = 0
        while left:
            directory = left.pop()
            if directory in seen:
                continue
            seen.add(directory)
            for entry in _entries(directory):
                entries += 1
                if entries > MAX_ENTRIES:
                    return f"{path} holds more than {MAX_ENTRIES:,} files, too many to see where their links lead"
                if entry.is_symlink():
                    real = resolve(entry.path)
                    if not self._inside(real) or self._is_daemons(real):
                        return f"{entry.path} is a link that leads out of the allowed roots, to {real}"
                    left.append(real)
                elif entry.is_dir(follow_symlinks=False):
                    left.append(Path(entry.path))
        return None

    def left_roots(self, params: StageParams) -> str | None:
        """Which path of a stored job lies outside by now, because of a link changed since, or of other roots."""
        return next((fault for _, fault in self.refused(params)), None)

    def unreadable(self, path: str, coming: Collection[Path]) -> str | None:
        """Why an input cannot be used, or None. `coming` are output directories that will exist by then."""
        if not Path(path).is_absolute():
            return _relative(path)
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
            return _relative(path)
        real = resolve(path)
        if self._is_kept(real):
            return f"{path} belongs to the daemon; leave output_dir out to use the job's own directory"
        if (fault := taken(path, claimed)) is not None:
            return f"{fault}; name another"
        if (fault := unusable(real, os.W_OK)) is not None:
            return fault
        try:
            return _occupied(path, real)
        except OSError as error:
            return f"{path} cannot be used: {error.strerror}"


def taken(path: str, claimed: Mapping[Path, str]) -> str | None:
    """Which output directory of an unfinished job is this one, holds it or lies in it; None when none does."""
    real = resolve(path)
    for other, whose in claimed.items():
        if real.is_relative_to(other) or other.is_relative_to(real):
            how = "is" if real == other else "lies in" if real.is_relative_to(other) else "holds"
            return f"{path} {how} the output directory of {whose}" + ("" if real == other else f", {other}")
    return None


def _relative(path: str) -> str:
    """Why a path that is not absolute is no use: it may be one of the client's, or a name on a hub."""
    text = f"{path} is not an absolute path on the daemon's host"
    if path.startswith("~"):
        return f"{text}; ~ is not expanded"
    is_hub_id = path.count("/") == 1 and not path.startswith(".")
    return f"{text}; a model on a hub is downloaded first and named by its directory" if is_hub_id else text


def _entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    """What a directory holds; nothing of one that is none, is not there or cannot be read."""
    try:
        with os.scandir(directory) as found:
            yield from found
    except OSError:
        return


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
