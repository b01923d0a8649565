"""Which checkpoints of a training stay, and the link to the best one.

    <output_dir>/0, 1, 2 ...       of finished epochs
    <output_dir>/step_<n>          within an epoch, until a sound later one makes it needless
    <output_dir>/checkpoint_best   link to the sound one with the lowest validation loss, as speculators names it

Nothing is judged here: the caller says which checkpoint was found sound, and only older ones are ever removed.
"""

import contextlib
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from eagle3_core.checkpoint.manifest import MANIFEST_NAME
from eagle3_core.contract.jobdir import read_json
from eagle3_core.training.resume import WITHIN_EPOCH, checkpoints

BEST_LINK = "checkpoint_best"
VAL_LOSS = "val_loss"
"""Key under `extra` of a checkpoint's manifest: the loss of its epoch over the held-out rows."""


def needless(
    sound: Path, keep_last: int | None, keep_every: int | None, unsound: Collection[Path] = ()
) -> list[tuple[Path, str]]:
    """Checkpoints beside a sound one that are not kept, oldest first, and why.

    Args:
        sound: the checkpoint just judged usable; it stays, and so does whatever is newer.
        keep_last: epoch checkpoints to keep, this one included; None keeps all.
        keep_every: also those of every so many epochs, counted from 1.
        unsound: checkpoints known not to be usable; they do not count as kept.
    """
    there = checkpoints(sound.parent)
    place = next((number for number, (_, path, _) in enumerate(there) if path == sound), None)
    if place is None:
        return []
    linked = _linked(sound.parent)
    epochs = [path for _, path, _ in there[place:] if path.name.isdigit() and path not in unsound]
    kept = {sound, *(epochs if keep_last is None else epochs[:keep_last])}
    found = []
    for _, path, _ in reversed(there[place + 1 :]):
        if path in kept or path.resolve() in linked:
            continue
        if path.name.startswith(WITHIN_EPOCH):
            found.append((path, f"{sound.name} is sound and later"))
        elif keep_last is not None and not (keep_every and (int(path.name) + 1) % keep_every == 0):
            found.append((path, f"keep_last {keep_last}"))
    return found


def _linked(directory: Path) -> set[Path]:
    """What the links in a directory lead to."""
    return {path.resolve() for path in directory.iterdir() if path.is_symlink()}


def best_link_fault(directory: Path) -> str | None:
    """What is wrong with the link to the best checkpoint, or None; an absent one is not wrong."""
    link = directory / BEST_LINK
    if not link.is_symlink():
        return f"{link} is no link; it is left alone, and no best checkpoint is marked" if link.exists() else None
    target = link.resolve()
    if target.parent != directory.resolve():
        return f"{link} leads out of the output directory, to {target}; it is not followed"
    return None if target.exists() else f"{link} leads to {target.name}, which is not there"


def mark_best(sound: Path) -> bool:
    """Point the link at a sound checkpoint if none before had a lower validation loss; says whether it was.

    Raises:
        OSError: the file system is full, or has no links.
    """
    link = sound.parent / BEST_LINK
    loss = _val_loss(sound)
    if loss is None or (link.exists() and not link.is_symlink()):
        return False
    best = None if best_link_fault(sound.parent) or not link.is_symlink() else _val_loss(link.resolve())
    if best is not None and best <= loss:
        return False
    fresh = link.with_name(f".{BEST_LINK}.tmp")
    fresh.unlink(missing_ok=True)
    try:
        fresh.symlink_to(sound.name)
        fresh.replace(link)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    return True


def _val_loss(checkpoint: Path) -> float | None:
    manifest: Any = None
    with contextlib.suppress(ValueError, OSError):
        manifest = read_json(checkpoint / MANIFEST_NAME)
    extra = manifest.get("extra") if isinstance(manifest, dict) else None
    loss = extra.get(VAL_LOSS) if isinstance(extra, dict) else None
    return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else None
