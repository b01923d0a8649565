"""The progress of a program that is not ours: readings of its lines become events, at most one of a kind a second."""

import math
import time
from dataclasses import dataclass, field, replace
from typing import Any

from worker.adapters.reading import Reading
from worker.context import StageContext
from worker.progress import INTERVAL_S


@dataclass
class _Epoch:
    """An epoch that was seen to begin."""

    number: int
    began: float
    trained: float | None = None
    losses: float = 0.0
    count: int = 0
    accuracy: tuple[float, ...] | None = None
    validation: dict[str, float] | None = None
    told: bool = False


@dataclass(frozen=True)
class _Known:
    """The latest value of everything."""

    step: int | None = None
    steps: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    loss: float | None = None
    accuracy: tuple[float, ...] | None = None
    lr: float | None = None
    tokens_per_s: float | None = None
    eta_s: float | None = None
    unit: str | None = None


@dataclass
class ForeignProgress:
    """Takes readings, tells events.

    Attributes:
        live: what comes is new. False while the past of a log is read: how long its epochs took cannot be told.
        nonfinite: a loss was not finite, at this step.
        finished: the program said that it is done.
    """

    context: StageContext
    total_steps: int | None = None
    live: bool = True
    nonfinite: str | None = None
    finished: bool = False
    _known: _Known = field(default_factory=_Known)
    _epoch: _Epoch | None = None
    _values: dict[str, float] | None = None
    _changed: bool = False
    _told_at: float = -math.inf
    _phase: str | None = None
    _stride: int = 0
    _stands_in: bool = False

    def take(self, reading: Reading) -> None:
        """Note what a line told."""
        if self._stands_in and not reading.stand_in:
            self._known, self._stride = _Known(), 0
        self._stands_in = reading.stand_in
        known = self._known
        before = known.step
        if reading.epoch is not None and reading.epoch != known.epoch:
            self._next_epoch(reading.epoch)
        told = {name: value for name, value in vars(reading).items() if name in vars(known) and value is not None}
        known = self._known = replace(known, **{"eta_s": None, **told})
        if known.step is not None and before is not None and known.step > before:
            self._stride = max(self._stride, known.step - before)
        self._finished(reading)
        self._note_epoch(reading)
        self._changed = True

    def _finished(self, reading: Reading) -> None:
        self.finished |= reading.finished
        if reading.values or reading.validation:
            shown = {f"val_{name}": value for name, value in (reading.validation or {}).items()}
            self._values = {**(self._values or {}), **(reading.values or {}), **shown}
        if reading.loss is not None and not math.isfinite(reading.loss) and self.nonfinite is None:
            self.nonfinite = f"the output shows a loss of {reading.loss}" + self._place()
            self.context.warn("nonfinite_loss", self.nonfinite)
        if reading.phase is not None and reading.phase != self._phase:
            self._phase = reading.phase
            self.context.events.write("phase", phase=reading.phase)

    def _place(self) -> str:
        return "" if self._known.step is None else f" at step {self._known.step}"

    def tell(self, now: bool = False) -> None:
        """Write what has changed, once a second; `now` at the end."""
        if not self._changed or (not now and time.monotonic() - self._told_at < INTERVAL_S):
            return
        known = self._known
        fields: dict[str, Any] = {name: value for name, value in vars(known).items() if value is not None}
        fields["steps"] = known.steps or self.total_steps
        self.context.events.write("progress", **fields)
        if self._values and known.step is not None:
            self.context.events.write("metric", step=known.step, values=self._values)
        self._values = None
        self._told_at, self._changed = time.monotonic(), False

    def end(self, succeeded: bool) -> None:
        """Write what is left; an epoch that a successful program ended with has ended too."""
        if succeeded or self.finished:
            self._tell_epoch()
        self.tell(now=True)

    def unfinished(self) -> str | None:
        """Where the program stood, if that was clearly before its end: by more than it goes on between two lines."""
        known = self._known
        steps = known.steps or self.total_steps
        if self.finished or known.step is None or steps is None or not self._stride:
            return None
        return f"step {known.step} of {steps}" if steps - known.step >= self._stride else None

    def _next_epoch(self, number: int) -> None:
        self._tell_epoch()
        self._epoch = _Epoch(number, time.monotonic()) if self.live else None

    def _note_epoch(self, reading: Reading) -> None:
        epoch = self._epoch
        if epoch is None or (reading.epoch is not None and reading.epoch != epoch.number):
            return
        if reading.loss is not None and math.isfinite(reading.loss):
            epoch.losses += reading.loss
            epoch.count += 1
        epoch.accuracy = reading.accuracy or epoch.accuracy
        if (reading.phase == "validating" or reading.validation is not None) and epoch.trained is None:
            epoch.trained = time.monotonic()
        if reading.validation is not None:
            epoch.validation = reading.validation
        if reading.epoch_over:
            self._tell_epoch()

    def _tell_epoch(self) -> None:
        """The epoch event: the mean of the losses its lines showed, and its validation."""
        epoch = self._epoch
        if epoch is None or epoch.told:
            return
        now = time.monotonic()
        trained = now if epoch.trained is None else epoch.trained
        train: dict[str, Any] = {} if not epoch.count else {"loss": epoch.losses / epoch.count}
        if epoch.accuracy is not None:
            train["accuracy"] = epoch.accuracy
        self.context.events.write(
            "epoch",
            epoch=epoch.number,
            epochs=max(self._known.epochs or 0, epoch.number + 1),
            train_s=round(trained - epoch.began, 3),
            val_s=round(now - trained, 3),
            train=train,
            val=epoch.validation,
        )
        epoch.told = True
