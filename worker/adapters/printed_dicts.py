"""Trainers that print their metrics as a Python dict: SpecForge, and Hugging Face's Trainer.

    step 120: {'loss': 3.21, 'acces': [0.42, 0.35], 'lr': 9.1e-05}                  SpecForge 0.2.0
     17%|#6   | 2/12 [00:01<00:05,  2.0it/s]                                         Trainer, the bar of the run
    {'loss': '4.174', 'grad_norm': '0.874', 'learning_rate': '4.5e-05', 'epoch': '0.3333'}

Source: specforge/training/assembly.py of the wheel 0.2.0; transformers/trainer_callback.py 4.57 (numbers) and 5.19
(numbers in quotes).
"""

import math
import re

from worker.adapters.bars import find_bar
from worker.adapters.reading import Reading, pairs_of_dict, scalar, scalars, whole

_SPECFORGE = re.compile(r"(?:^|\] )step (\d{1,12}): (\{.*)")
_TRAINER = re.compile(r"\{'(?:loss|eval_loss|train_runtime|eval_runtime)': .*'epoch': ")
_ACCURACIES = ("acces", "train/acces", "acceptance_rates")


class SpecForge:
    """One line each `log_interval`. How many steps there will be is shown on terminals only."""

    def read(self, line: str) -> Reading | None:
        """A metrics line."""
        found = _SPECFORGE.search(line)
        if found is None:
            return None
        pairs = pairs_of_dict(found[2])
        step = int(found[1])
        if any(name.startswith("eval/") for name in pairs):
            return Reading(step=step, values=scalars(pairs), unit="steps")
        listed = next((value for name in _ACCURACIES if isinstance(value := pairs.get(name), tuple)), ())
        single = scalar(pairs, "acc", "accuracy", "train/acc", "train/accuracy")
        return Reading(
            step=step,
            loss=scalar(pairs, "loss", "train/loss"),
            accuracy=listed or (None if single is None else (single,)),
            lr=scalar(pairs, "lr", "train/lr"),
            unit="steps",
            values=scalars(pairs),
        )


class HfTrainer:
    """Steps come from the run's bar, everything else from the dicts; a dict belongs to the step of the next bar."""

    def __init__(self, sure: bool) -> None:
        """`sure`: a bar alone is enough; else the first dict must come before bars are believed."""
        self._sure = sure
        self._total: int | None = None
        self._step: int | None = None
        self._at: float | None = None
        self._epochs: int | None = None

    def read(self, line: str) -> Reading | None:
        """A dict, or the bar of the whole run."""
        if found := _TRAINER.search(line):
            self._sure = True
            return self._metrics(pairs_of_dict(line[found.start() :]))
        bar = find_bar(line)
        if bar is None or bar.description:
            return None  # what it loads, maps or saves
        if self._total is None:
            self._total = bar.total
        if bar.total != self._total:
            return None  # an evaluation's
        self._step = bar.n
        if self._at and bar.n:
            about = bar.total * self._at / bar.n
            self._epochs = max(1, round(about) if abs(about - round(about)) < 0.05 else math.ceil(about))
            self._at = None
        if not self._sure:
            return None
        return Reading(step=bar.n, steps=bar.total, epochs=self._epochs, eta_s=bar.left_s, unit="steps")

    def _metrics(self, pairs: dict[str, float | tuple[float, ...]]) -> Reading:
        at = scalar(pairs, "epoch") or 0.0
        if whole(at) is None:
            return Reading(values=scalars(pairs))
        epoch = max(0, math.ceil(at - 1e-9) - 1)
        epochs = None if self._epochs is None else max(self._epochs, epoch + 1)
        values = scalars(pairs)
        if "train_runtime" in pairs:
            return Reading(step=self._total, steps=self._total, epoch=epoch, epochs=epoch + 1, finished=True)
        if any(name.startswith("eval_") for name in pairs):
            metrics = {name.removeprefix("eval_"): value for name, value in values.items() if name != "epoch"}
            return Reading(epoch=epoch, epochs=epochs, validation=metrics, values=values)
        self._at = at
        return Reading(
            epoch=epoch,
            epochs=epochs,
            loss=scalar(pairs, "loss"),
            lr=scalar(pairs, "learning_rate"),
            values=values,
            unit="steps",
        )
