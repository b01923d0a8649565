"""How long a training still takes."""

import time
from types import SimpleNamespace

from worker.stages.train import Run


def test_what_is_left_follows_from_the_pace_of_the_whole_attempt(monkeypatch):
    """Validating and saving take time too, and the first step of an epoch tells little of the others."""
    run = Run(params=None, trainer=SimpleNamespace(total_steps=110), keeper=None, began=(100.0, 10))
    monkeypatch.setattr(time, "monotonic", lambda: 150.0)
    assert run.left_s(20) == 50 / 10 * 90
    assert run.left_s(110) == 0
