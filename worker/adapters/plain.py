"""Lines in the words most people print: `Epoch 1/5 step 120/768 loss 5.29 lr 3e-5`.

A line counts when it names a loss and an epoch or a step; so does a bar of tqdm that is called `Epoch 3`. Epochs count
from 1, unless one is called 0. Steps are taken for those of the whole run until they contradict the epochs (they began
anew, or went faster than the epochs): from then on they are those of an epoch. A regular expression of the user's says
the same beyond doubt.
"""

import re

from worker.adapters.bars import find_bar
from worker.adapters.reading import NUMBER, Reading

_SEPARATOR = r"[\s:=#\[(]{1,3}"
_EPOCH = re.compile(rf"\bepochs?{_SEPARATOR}(\d{{1,6}})(?:\s?(?:/|of)\s?(\d{{1,6}}))?\b(?![.\d])", re.IGNORECASE)
_STEP = re.compile(
    rf"\b(?:global[_ ]?)?(?:step|iter(?:ation)?|batch)s?{_SEPARATOR}(\d{{1,12}})(?:\s?(?:/|of)\s?(\d{{1,12}}))?\b",
    re.IGNORECASE,
)
_LOSS = re.compile(rf"(?<![\w/])(?:train[_ /])?loss{_SEPARATOR}({NUMBER})(?![\w])", re.IGNORECASE)
_RATE = re.compile(rf"\b(?:lr|learning[_ ]rate){_SEPARATOR}({NUMBER})", re.IGNORECASE)
_ACCURACY = re.compile(rf"\bacc(?:uracy)?{_SEPARATOR}({NUMBER})(?![\w%])", re.IGNORECASE)
_SPEED = re.compile(rf"({NUMBER})\s?tok(?:en)?s?/s", re.IGNORECASE)
_SLACK = 0.01


class Plain:
    """Remembers where epochs begin to count and what steps count."""

    def __init__(self) -> None:
        self._first_epoch = 1
        self._within_epoch = False
        self._last: tuple[int, int] | None = None

    def read(self, line: str) -> Reading | None:
        """A line with a loss and an epoch or a step, or the bar of an epoch."""
        loss, epoch, step = _LOSS.search(line), _EPOCH.search(line), _STEP.search(line)
        bar = find_bar(line) if epoch is not None else None
        if (loss is None and bar is None) or (epoch is None and step is None):
            return None
        self._within_epoch |= bar is not None
        rate, accuracy, speed = _RATE.search(line), _ACCURACY.search(line), _SPEED.search(line)
        number, epochs = _numbers(epoch)
        if number == 0:
            self._first_epoch = 0
        index = None if number is None else max(0, number - self._first_epoch)
        done, steps = self._of_the_run(index, epochs, *(_numbers(step) if bar is None else (bar.n, bar.total)))
        return Reading(
            step=done,
            steps=steps,
            epoch=index,
            epochs=epochs,
            loss=None if loss is None else float(loss[1]),
            accuracy=None if accuracy is None else (float(accuracy[1]),),
            lr=None if rate is None else float(rate[1]),
            tokens_per_s=None if speed is None else float(speed[1]),
            unit="steps",
        )

    def _of_the_run(
        self, index: int | None, epochs: int | None, step: int | None, steps: int | None
    ) -> tuple[int | None, int | None]:
        """Step and steps of the whole run."""
        if step is None or index is None:
            return step, steps
        if self._last is not None and index > self._last[0] and step < self._last[1]:
            self._within_epoch = True  # they began anew
        self._last = (index, step)
        if steps and epochs and step > steps * ((index + 1) / epochs + _SLACK):
            self._within_epoch = True  # faster than the epochs
        if not self._within_epoch:
            return step, steps
        if not steps:
            return None, None
        return index * steps + step, None if epochs is None else epochs * steps


def _numbers(found: re.Match[str] | None) -> tuple[int | None, int | None]:
    """`3/5` as (3, 5), `3` as (3, None)."""
    if found is None:
        return None, None
    return int(found[1]), None if found[2] is None else int(found[2])
