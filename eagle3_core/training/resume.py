"""Going on from a checkpoint: which one, and how its state comes back.

A checkpoint's manifest holds, under `extra.position`, the epoch, the rows done in it and their sums. Weights come back
from their bfloat16 copies, optimizer and schedule in full precision.
"""

import itertools
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eagle3_core.checkpoint.format import read_drafter_config, read_drafter_tensors
from eagle3_core.checkpoint.judge import judge
from eagle3_core.checkpoint.manifest import MANIFEST_NAME
from eagle3_core.contract.jsonfiles import read_json_object
from eagle3_core.errors import BadInput, CheckpointError
from eagle3_core.training.trainer import Position, Trainer

WITHIN_EPOCH = "step_"
"""Prefix of checkpoints written within an epoch; those of finished epochs are named by the epoch alone."""


@dataclass(frozen=True)
class Found:
    """A checkpoint to go on from."""

    path: Path
    step: int
    position: dict[str, Any]


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
            manifest = _manifest(path)
            if manifest is not None:
                found.append((manifest["step"], path, manifest))
    return sorted(found, key=lambda entry: (entry[0], entry[1].name.isdigit()), reverse=True)


def _manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint that can be gone on from; None where there is none, or it is damaged."""
    with suppress(BadInput):
        manifest = read_json_object(path / MANIFEST_NAME)
        extra = manifest.get("extra")
        if type(manifest.get("step")) is int and isinstance(extra, dict) and isinstance(extra.get("position"), dict):
            return manifest
    return None


def move_aside(path: Path) -> Path:
    """Rename what lies where a checkpoint belongs and is none to go on from; returns its new place."""
    names = (path.with_name(f"{path.name}.unsound{number or ''}") for number in itertools.count())
    aside = next(name for name in names if not name.exists() and not name.is_symlink())
    return path.rename(aside)


def find_latest(directory: Path) -> tuple[Found | None, list[tuple[Path, str]]]:
    """The latest checkpoint of an output directory that the judge lets pass, None when there is none; and those later
    ones that could not be used: (path, why).
    """
    passed_over: list[tuple[Path, str]] = []
    for step, path, manifest in checkpoints(directory):
        verdict = judge(path)
        if verdict.usable:
            return Found(path, step, manifest["extra"]["position"]), passed_over
        passed_over.append((path, f"{verdict.verdict}: {verdict.errors()}"))
    return None, passed_over


def restore(trainer: Trainer, found: Found) -> None:
    """Bring weights, optimizer, schedule, step and position of a checkpoint into a fresh trainer.

    Raises:
        CheckpointError: the checkpoint is of another shape or run.
    """
    try:
        optimizer = _load(found.path / "optimizer_state_dict.pt")
        if differing := _differences(trainer, found, optimizer["param_groups"]):
            raise ValueError(f"{'; '.join(differing)}. To start from its weights alone, give it as finetune_from")
        trainer.drafter.load_state_dict(read_drafter_tensors(found.path))
        trainer.optimizer.load_state_dict(optimizer)
        trainer.scheduler.load_state_dict(_load(found.path / "scheduler_state_dict.pt"))
        saved = found.position["totals"]
        sums = {name: saved[name] for name in ("loss", "correct", "rows", "skipped") if name in saved}
        totals = replace(trainer.position.totals, **sums)
        trainer.position = Position(**{**found.position, "totals": totals})
        if not all(type(place) is int and place >= 0 for place in (trainer.position.epoch, trainer.position.rows_done)):
            raise ValueError(f"its position is epoch {trainer.position.epoch}, row {trainer.position.rows_done}")
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{found.path} does not fit this run: {error}") from error
    trainer.step = found.step


def _differences(trainer: Trainer, found: Found, groups: list[dict[str, Any]]) -> list[str]:
    """In what it was made otherwise than this run makes it: shape, trained parameters, TTT steps."""
    theirs, ours = dict(read_drafter_config(found.path).config), dict(trainer.drafter.config)
    differing = [f"{key} is {theirs[key]} there, {ours[key]} here" for key in ours if theirs[key] != ours[key]]
    there = {name for group in groups for name in group.get("param_names", ())}
    here = {name for name, parameter in trainer.drafter.named_parameters() if parameter.requires_grad}
    for names, word in ((there - here, "there and not here"), (here - there, "here and not there")):
        if there and names:
            differing.append(f"{', '.join(sorted(names))} trained {word}")
    steps = len(found.position["totals"]["rows"])
    if steps != trainer.params.ttt_steps:
        differing.append(f"ttt_steps is {steps} there, {trainer.params.ttt_steps} here")
    return differing


def _load(path: Path) -> dict[str, Any]:
    """A state file, tensors and plain values only."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    assert isinstance(state, dict)
    return state
