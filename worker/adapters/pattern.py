"""A regular expression of the user's, whose named groups are what a line tells.

It is searched by the module `regex`, which gives up after a time: Python's own `re` has no limit, and a pattern such as
`(a+)+$` on the wrong line would hold the interpreter for hours, stops and heartbeats with it.
"""

from collections.abc import Callable

import regex

from eagle3_core.errors import BadInput
from worker.adapters.reading import Reading, whole

LIMIT_S = 0.1
"""For one line; lines are 8 KiB at most."""

MAX_TIMEOUTS = 3


class Pattern:
    """Given up, with a warning, when it is too slow time and again."""

    def __init__(self, pattern: str, warn: Callable[[str, str], None]) -> None:
        """`warn` is told why it is given up.

        Raises:
            BadInput: it is one that only Python's own `re` can compile.
        """
        try:
            self._pattern = regex.compile(pattern)
        except (regex.error, RecursionError, MemoryError) as error:
            raise BadInput(f"the expression of `progress` cannot be used: {error}; simplify it") from error
        self._warn = warn
        self._timeouts = 0

    def read(self, line: str) -> Reading | None:
        """What the groups hold where the pattern is found."""
        if self._timeouts >= MAX_TIMEOUTS:
            return None
        try:
            found = self._pattern.search(line, timeout=LIMIT_S)
        except TimeoutError:
            self._timeouts += 1
            if self._timeouts == MAX_TIMEOUTS:
                text = (
                    f"`progress` took more than {LIMIT_S} s on {MAX_TIMEOUTS} lines and is no longer used: simplify it"
                )
                self._warn("regex_too_slow", text)
            return None
        return None if found is None else _reading(found.groupdict())


def _reading(groups: dict[str, str | None]) -> Reading | None:
    numbers = {name: value for name, text in groups.items() if (value := _number(text)) is not None}
    if not numbers:
        return None
    epochs, per_epoch = _whole(numbers, "epochs"), _whole(numbers, "epoch_steps")
    epoch = _whole(numbers, "epoch0")
    if epoch is None and (first := _whole(numbers, "epoch")) is not None:
        epoch = max(0, first - 1)
    step, steps = _whole(numbers, "step"), _whole(numbers, "steps")
    if (within := _whole(numbers, "epoch_step")) is not None and per_epoch is not None:
        step = (epoch or 0) * per_epoch + within
        steps = per_epoch if epochs is None else per_epoch * epochs
    return Reading(
        step=step,
        steps=steps,
        epoch=epoch,
        epochs=epochs,
        loss=numbers.get("loss"),
        accuracy=(numbers["accuracy"],) if "accuracy" in numbers else None,
        lr=numbers.get("lr"),
        tokens_per_s=numbers.get("tokens_per_s"),
        eta_s=numbers.get("eta_s"),
        unit="steps",
    )


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text.replace(",", ""))
    except ValueError:
        return None


def _whole(numbers: dict[str, float], name: str) -> int | None:
    return whole(numbers.get(name))
