"""Three GPUs whose driver fails for a while; what is handed out meanwhile is for the witness to see."""

import random
import shutil
import threading
from pathlib import Path

from tests.nvml.fake import FakeNvml, compile_library

CARDS = 3
TROUBLES: tuple[tuple[str, ...], ...] = (
    ("hang MemoryInfo",),
    ("hang ComputeRunningProcesses",),
    ("init 9",),  # the driver is not loaded
    ("init 18",),  # library and driver differ in version
    ("error 1 MemoryInfo 15",),  # the GPU is lost
    ("error * ComputeRunningProcesses 3",),  # not supported: nobody knows who is on it
    ("generation 2",),  # the driver was loaded anew
    ("used 0 80000000000",),  # somebody fills it
)


class ChaosGpus:
    """The fake cards, and how they fail."""

    def __init__(self, place: Path) -> None:
        directory = place / "nvml"
        directory.mkdir()
        compile_library(directory)
        self._nvml = FakeNvml(directory, directory / "control")
        self.environment = self._nvml.environment
        self.recover("0 1 2")

    def recover(self, order: str) -> None:
        """Back to health, the cards in this order."""
        self._nvml.tell(order=order)

    def fail(self, chance: random.Random) -> threading.Thread:
        """Have something go wrong for a while, soon; afterwards the cards may come in another order."""
        begin, length = chance.uniform(0, 0.5), chance.uniform(0.2, 2.0)
        trouble = chance.choice(TROUBLES)
        order = " ".join(chance.sample([str(card) for card in range(CARDS)], CARDS))

        def go_wrong() -> None:
            pause = threading.Event()
            pause.wait(begin)
            self._nvml.tell(*trouble, order=order)
            pause.wait(length)
            self.recover(order)

        thread = threading.Thread(target=go_wrong, name="nvml trouble")
        thread.start()
        return thread


def chaos_gpus(place: Path) -> ChaosGpus | None:
    """The cards, or None where there is no compiler to make their library."""
    return None if shutil.which("cc") is None else ChaosGpus(place)
