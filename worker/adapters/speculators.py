"""speculators' trainer, 0.3.0 to 0.9.0: records of `name=value` through rich, which breaks them over lines.

    [18:10:32] INFO     Training epoch 1/2 started                   trainer.py:610
               INFO     train/loss=5.123, train/full_acc_0=0.123,    trainer.py:545
                        profile/tokens_per_s=1.23e+04, epoch=0,
                        lr=1.00e-04, global_step=0

0.3.0 prints neither `profile/` nor `global_step`: its steps are counted. How many steps an epoch has is known from its
bar, which rich shows in a file only when it is full, or when the epoch has ended.

Source: speculators/train/trainer.py and logger.py (FormatDictFilter) of the wheels 0.3.0 and 0.9.0.
"""

import re

from worker.adapters.reading import NUMBER, Reading, whole

_RECORD = re.compile(r"^(?:\[\d\d:\d\d:\d\d\]| {10})? ?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) ")
_PAIR = re.compile(rf"(?<![\w/])([a-zA-Z_][\w/]{{0,80}})=({NUMBER})(?=,|\s|$)", re.IGNORECASE)
_EPOCH = re.compile(r"(Training|Validation) epoch (\d{1,6})/(\d{1,6}) (started|completed)")
_BAR = re.compile(r"Epoch \d{1,6}\s+\d+%.{0,200}?(\d{1,15})/(\d{1,15})\s+\[ ?\d+:\d\d:\d\d <")
_MAX_PAIRS = 500


class Speculators:
    """Puts a record together from its lines."""

    def __init__(self) -> None:
        self._pairs: dict[str, float] = {}
        self._done = 0
        self._epoch_began_at = 0
        self._epochs: int | None = None
        self._epoch = 0
        self._per_epoch: int | None = None
        self._validates = False

    def read(self, line: str) -> Reading | None:
        """A whole record, or one of the messages around an epoch."""
        if _RECORD.match(line):
            self._pairs = {}
        if told := _EPOCH.search(line):
            return self._message(told[1], int(told[2]), int(told[3]), told[4])
        if bar := _BAR.search(line):
            if not self._validates:
                self._per_epoch = int(bar[2])
            return None
        for name, value in _PAIR.findall(line):
            if len(self._pairs) < _MAX_PAIRS:
                self._pairs[name] = float(value)
        return self._record()

    def _record(self) -> Reading | None:
        """What the pairs so far say, once they are all there."""
        pairs = self._pairs
        train = {name.removeprefix("train/"): value for name, value in pairs.items() if name.startswith("train/")}
        rate = any(name == "lr" or name.startswith("lr/") for name in pairs)
        newer = any(name.startswith("profile/") for name in pairs)
        epoch = whole(pairs.get("epoch"))
        if epoch is None:
            return None
        if train and ("global_step" in pairs or (rate and not newer and "lr" in pairs)):
            self._pairs = {}
            return self._step(pairs, train, epoch)
        val = {name.removeprefix("val/"): value for name, value in pairs.items() if name.startswith("val/")}
        if val:
            self._pairs = {}
            metrics = {name.removesuffix("_epoch"): value for name, value in val.items()}
            return Reading(epoch=epoch, epochs=self._epochs, validation=metrics)
        return None

    def _step(self, pairs: dict[str, float], train: dict[str, float], epoch: int) -> Reading:
        global_step = whole(pairs.get("global_step"))
        self._done = self._done + 1 if global_step is None else global_step + 1
        self._epoch = epoch
        rates = [value for name, value in pairs.items() if name == "lr" or name.startswith("lr/")]
        return Reading(
            step=self._done,
            steps=self._total(),
            epoch=self._epoch,
            epochs=self._epochs,
            loss=train.get("loss"),
            accuracy=_accuracy(train),
            lr=max(rates, default=None),
            tokens_per_s=pairs.get("profile/tokens_per_s"),
            unit="steps",
            values=train,
        )

    def _message(self, what: str, number: int, epochs: int, manner: str) -> Reading:
        self._epoch, self._epochs = max(0, number - 1), epochs
        self._validates = what == "Validation" and manner == "started"
        if what == "Training" and manner == "started":
            self._epoch_began_at = self._done
        elif what == "Training":
            self._per_epoch = self._done - self._epoch_began_at or self._per_epoch
        over = what == "Validation" and manner == "completed"
        trained = what == "Training" and manner == "completed"
        return Reading(
            step=self._done or None,
            steps=self._total(),
            epoch=self._epoch,
            epochs=epochs,
            phase=None if over or trained else "training" if what == "Training" else "validating",
            epoch_over=over,
            finished=trained and number == epochs,
        )

    def _total(self) -> int | None:
        if self._per_epoch is None or self._epochs is None:
            return None
        return self._epoch_began_at + self._per_epoch * (self._epochs - self._epoch)


def _accuracy(train: dict[str, float]) -> tuple[float, ...] | None:
    """`full_acc_0`, `full_acc_1` ... in order."""
    found = {int(name.removeprefix("full_acc_")): value for name, value in train.items() if _FULL.fullmatch(name)}
    return tuple(found[step] for step in sorted(found)) or None


_FULL = re.compile(r"full_acc_\d{1,3}")
