"""Going on from a checkpoint: which one, and how its state comes back.

A checkpoint's manifest holds, under `extra.position`, the epoch, the rows done in it and their sums. Weights come back
from their bfloat16 copies, optimizer and schedule in full precision.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eagle3_core.checkpoint.format import read_drafter_tensors
from eagle3_core.checkpoint.judge import judge
from eagle3_core.checkpoint.manifest import MANIFEST_NAME
from eagle3_core.contract.jobdir import read_json
from eagle3_core.errors import CheckpointError
from eagle3_core.training.trainer import Position, Trainer

WITHIN_EPOCH = "step_"
"""Prefix of checkpoints written within an epoch; those of finished epochs are named by the epoch alone."""


@dataclass(frozen=True)
class Found:
    """A checkpoint to go on from, and those later ones that could not be used: (path, why)."""

    path: Path
    step: int
    position: dict[str, Any]
    passed_over: tuple[tuple[Path, str], ...]


def describe_position(position: Position) -> dict[str, Any]:
    """What the manifest keeps of a position."""
    return asdict(position)


def checkpoints(directory: Path) -> list[tuple[int, Path, dict[str, Any]]]:
    """(step, path, manifest) of every complete checkpoint of an output directory, the latest first.

    Links are none: what they lead to is another name of one, or lies elsewhere.
    """
    found = []
    for path in directory.iterdir() if directory.exists() else ():
        if (
            path.is_dir()
            and not path.is_symlink()
            and (path.name.isdigit() or path.name.removeprefix(WITHIN_EPOCH).isdigit())
        ):
            manifest = read_json(path / MANIFEST_NAME)
            if isinstance(manifest, dict) and isinstance(manifest.get("extra", {}).get("position"), dict):
                found.append((int(manifest["step"]), path, manifest))
    return sorted(found, key=lambda entry: (entry[0], entry[1].name.isdigit()), reverse=True)


def find_latest(directory: Path) -> Found | None:
    """The latest checkpoint of an output directory that the judge lets pass; None when there is none."""
    passed_over: list[tuple[Path, str]] = []
    for step, path, manifest in checkpoints(directory):
        verdict = judge(path)
        if verdict.usable:
            return Found(path, step, manifest["extra"]["position"], tuple(passed_over))
        passed_over.append((path, f"{verdict.verdict}: {verdict.errors()}"))
    return None


def restore(trainer: Trainer, found: Found) -> None:
    """Bring weights, optimizer, schedule, step and position of a checkpoint into a fresh trainer.

    Raises:
        CheckpointError: the checkpoint is of another shape or run.
    """
    try:
        trainer.drafter.load_state_dict(read_drafter_tensors(found.path))
        trainer.optimizer.load_state_dict(_load(found.path / "optimizer_state_dict.pt"))
        trainer.scheduler.load_state_dict(_load(found.path / "scheduler_state_dict.pt"))
        saved = found.position["totals"]
        sums = {name: saved[name] for name in ("loss", "correct", "rows", "skipped") if name in saved}
        totals = replace(trainer.position.totals, **sums)
        trainer.position = Position(**{**found.position, "totals": totals})
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{found.path} does not fit this run: {error}") from error
    trainer.step = found.step


def _load(path: Path) -> dict[str, Any]:
    """A state file, tensors and plain values only."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    assert isinstance(state, dict)
    return state
