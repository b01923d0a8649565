"""Checkpoints that a program of somebody else writes into a directory: found once they are whole.

    speculators  0/ 1/ ...          checkpoint_best -> 1 (links are passed over)
    SpecForge    RUN-step500/       training_state.pt, without a config.json
    Hugging Face checkpoint-500/    and the directory itself, for the model at the end

A directory counts when it holds weights and a config.json, or a training_state.pt. It is whole when its files have
not changed for SETTLE_S and every safetensors file is as long as its header says; one that stays torn is handed out
after TORN_S, or at the end. Hidden names and those with `tmp` in them are work in progress. Standard library only.
"""

import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eagle3_core.contract.headers import read_header
from eagle3_core.errors import BadInput

SETTLE_S = 3.0
TORN_S = 60.0
MAX_DEPTH = 3
MAX_DIRECTORIES = 2000
MAX_STATE_BYTES = 16 << 20

Content = tuple[tuple[str, int, int], ...]
"""Name, bytes and time of change of each file that is judged."""

_JUDGED = re.compile(r".*\.(?:safetensors|bin|pt|pth)|config\.json|manifest\.json|.*\.index\.json")
_WEIGHTS = re.compile(r"(?!adapter_|optimizer|scheduler|training_args|rng_state|vocab_map).*\.(?:safetensors|bin)")
_PICKLED = ("pytorch_model.pt", "model.pt", "draft_model.pt")
_STATE = "training_state.pt"
_UNFINISHED = re.compile(r"(?:^|[._-])te?mp(?:$|[._-])", re.IGNORECASE)


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint directory and what is known of it; epoch and step where its name or its state files tell."""

    path: Path
    content: Content
    epoch: int | None
    step: int | None

    @property
    def size(self) -> int:
        """Bytes of the files that are judged."""
        return sum(size for _, size, _ in self.content)


@dataclass
class _Seen:
    content: Content
    since: float
    handed_out: bool = False


class CheckpointWatch:
    """Looks into a directory again and again; each content of a checkpoint is handed out once."""

    def __init__(self, directory: Path, pass_over_present: bool) -> None:
        """Watch a directory, which may appear later.

        Args:
            directory: where checkpoints appear, up to three levels deep.
            pass_over_present: checkpoints that are there now are not handed out unless they change.
        """
        self._directory = directory
        self._seen: dict[Path, _Seen] = {}
        if pass_over_present:
            self._seen = {path: _Seen(content, 0.0, True) for path, content in _checkpoints(directory)}

    def look(self, final: bool = False) -> list[FoundCheckpoint]:
        """Checkpoints that have become whole since the last look, the oldest first.

        Args:
            final: nobody writes any more: what is there is all there will be.
        """
        now = time.monotonic()
        found = []
        present = dict(_checkpoints(self._directory))
        self._seen = {path: seen for path, seen in self._seen.items() if path in present}
        for path, content in present.items():
            seen = self._seen.get(path)
            if seen is None or seen.content != content:
                seen = self._seen[path] = _Seen(content, now)
            if seen.handed_out:
                continue
            age = now - seen.since
            if final or age >= TORN_S or (age >= SETTLE_S and _is_whole(path, content)):
                seen.handed_out = True
                found.append(_describe(path, content))
        return sorted(found, key=lambda one: max((time_ns for _, _, time_ns in one.content), default=0))


def _checkpoints(directory: Path) -> Iterator[tuple[Path, Content]]:
    """Every directory that looks like a checkpoint."""
    queue = [(directory, 0)]
    for _ in range(MAX_DIRECTORIES):
        if not queue:
            return
        place, depth = queue.pop()
        content: list[tuple[str, int, int]] = []
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        if depth < MAX_DEPTH and not entry.name.startswith(".") and not _UNFINISHED.search(entry.name):
                            queue.append((place / entry.name, depth + 1))
                    elif _JUDGED.fullmatch(entry.name):
                        stat = entry.stat()
                        content.append((entry.name, stat.st_size, stat.st_mtime_ns))
        except OSError:
            continue  # gone meanwhile, or not ours to read
        if _is_checkpoint({name for name, _, _ in content}):
            yield place, tuple(sorted(content))


def _is_checkpoint(names: set[str]) -> bool:
    weights = any(_WEIGHTS.fullmatch(name) for name in names) or any(name in names for name in _PICKLED)
    return _STATE in names or ("config.json" in names and weights)


def _is_whole(path: Path, content: Content) -> bool:
    """Whether every safetensors file is what its header says."""
    try:
        for name, _, _ in content:
            if name.endswith(".safetensors"):
                read_header(path / name)
    except (BadInput, OSError):
        return False
    return True


_NUMBER = re.compile(r"\d{1,6}")
_STEP = re.compile(r"(?:checkpoint|step)[-_]?(\d{1,12})(?!\d)", re.IGNORECASE)
_EPOCH = re.compile(r"epoch[-_]?(\d{1,9})(?!\d)", re.IGNORECASE)


def _describe(path: Path, content: Content) -> FoundCheckpoint:
    """Epoch and step by name, else by what speculators and Hugging Face write beside the weights."""
    name = path.name
    epoch = int(name) if _NUMBER.fullmatch(name) else _first(_EPOCH.search(name))
    step = _first(_STEP.search(name))
    for file in ("training_state.json", "trainer_state.json"):
        state = _state(path / file)
        step = _count(state.get("global_step")) if step is None else step
        if epoch is None and file == "training_state.json":
            epoch = _count(state.get("epoch"))
    return FoundCheckpoint(path, content, epoch, step)


def _first(found: re.Match[str] | None) -> int | None:
    return None if found is None else int(found[1])


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 53 else None


def _state(file: Path) -> dict[str, object]:
    try:
        with file.open("rb") as opened:
            found = json.loads(opened.read(MAX_STATE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
