"""Learning-rate schedules: warm-up, then cosine, linear or constant."""

import math
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Schedule = Literal["cosine", "linear", "constant"]


def warmup_steps(total_steps: int, warmup_ratio: float) -> int:
    """Optimizer steps of warm-up, rounded up: a ratio above zero warms up at least one step."""
    return math.ceil(total_steps * warmup_ratio)


def lr_factor(step: int, total_steps: int, warmup: int, schedule: Schedule) -> float:
    """Share of the peak learning rate at a step, counted from 0; linear from near zero through the warm-up."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    return 1 - done if schedule == "linear" else 1.0


def make_scheduler(optimizer: Optimizer, total_steps: int, warmup: int, schedule: Schedule) -> LambdaLR:
    """The schedule, to be stepped once an optimizer step."""
    return LambdaLR(optimizer, lambda step: lr_factor(step, total_steps, warmup, schedule))
