"""What one line of a foreign program's output tells, in the words of our own events.

line --Adapter.read--> Reading --ProgramProgress--> progress, metric, epoch, phase, warning
"""

import math
import re
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Reading:
    """What a line says; None where it says nothing of it.

    Attributes:
        step: steps done, of the whole run; `steps`: how many there will be.
        epoch: counts from 0; `epochs`: how many there will be.
        loss: may be NaN or infinite.
        accuracy: of each TTT step, or one value.
        eta_s: seconds left of the whole run, where the program says so itself.
        unit: what `step` counts.
        phase: training or validating.
        values: further named values.
        validation: metrics of the validation of `epoch`.
        epoch_over: this epoch has ended, its validation included.
        finished: the program says that its work is done.
        stand_in: of a bar that may be about something else, such as loading: forgotten once the format is known.
    """

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
    phase: str | None = None
    values: dict[str, float] | None = None
    validation: dict[str, float] | None = None
    epoch_over: bool = False
    finished: bool = False
    stand_in: bool = False


class Adapter(Protocol):
    """Reads one format. It may remember earlier lines: records are spread over several."""

    def read(self, line: str) -> Reading | None:
        """What the line tells, or None when it is not of this format or not yet complete."""


_EXPONENT = r"(?:[eE][-+]?\d{1,5})?"
NUMBER = rf"[-+]?(?:\d{{1,40}}(?:\.\d{{0,40}})?{_EXPONENT}|\.\d{{1,40}}{_EXPONENT}|nan|inf(?:inity)?)"
"""A number as programs print it, with NaN and infinities; match it ignoring case."""

MAX_COUNT = 1 << 53
"""More than any step; doubles hold what is below exactly."""


def whole(value: float | None) -> int | None:
    """A printed count as a number, or None for one that cannot be: negative, not finite, or beyond MAX_COUNT."""
    return int(value) if value is not None and math.isfinite(value) and 0 <= value < MAX_COUNT else None


_PAIR = re.compile(rf"'([\w/.-]{{1,80}})': (?:'?({NUMBER})'?|\[([^\]]{{0,2000}})\])(?=[,}}])", re.IGNORECASE)


def pairs_of_dict(text: str) -> dict[str, float | tuple[float, ...]]:
    """Numbers and lists of numbers of a printed dict, by name; values in quotes count too, others are passed over."""
    found: dict[str, float | tuple[float, ...]] = {}
    for name, number, items in _PAIR.findall(text):
        if number:
            found[name] = float(number)
        else:
            found[name] = tuple(float(item) for item in re.findall(NUMBER, items, re.IGNORECASE))
    return found


def scalar(pairs: dict[str, float | tuple[float, ...]], *names: str) -> float | None:
    """The value of the first of these names that has a single one."""
    return next((value for name in names if isinstance(value := pairs.get(name), float)), None)


def scalars(pairs: dict[str, float | tuple[float, ...]]) -> dict[str, float]:
    """All single values."""
    return {name: value for name, value in pairs.items() if isinstance(value, float)}
