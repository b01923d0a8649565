"""The adapter for a `progress` parameter."""

from collections.abc import Callable
from dataclasses import replace

from eagle3_core.contract.params import Progress
from worker.adapters.bars import Tqdm
from worker.adapters.pattern import Pattern
from worker.adapters.plain import Plain
from worker.adapters.printed_dicts import HfTrainer, SpecForge
from worker.adapters.reading import Adapter, Reading
from worker.adapters.speculators import Speculators


class Nothing:
    """No format at all."""

    def read(self, line: str) -> Reading | None:
        """None."""
        return None


class Auto:
    """Whichever format recognises a line first, and that one from then on; bars count until then."""

    def __init__(self) -> None:
        self._formats: list[Adapter] = [Speculators(), SpecForge(), HfTrainer(sure=False), Plain()]
        self._bars = Tqdm()
        self._chosen: Adapter | None = None

    def read(self, line: str) -> Reading | None:
        """What the chosen format reads, or the first one that reads anything."""
        if self._chosen is not None:
            return self._chosen.read(line)
        for one in self._formats:
            if (reading := one.read(line)) is not None:
                self._chosen = one
                return reading
        bar = self._bars.read(line)
        return None if bar is None else replace(bar, stand_in=True)


_BY_NAME: dict[str, Callable[[], Adapter]] = {
    "auto": Auto,
    "none": Nothing,
    "speculators": Speculators,
    "specforge": SpecForge,
    "hf_trainer": lambda: HfTrainer(sure=True),
    "tqdm": Tqdm,
    "plain": Plain,
}


def choose_adapter(progress: Progress, warn: Callable[[str, str], None]) -> Adapter:
    """The adapter named, or one made of the user's expression."""
    return Pattern(progress["regex"], warn) if isinstance(progress, dict) else _BY_NAME[progress]()
