"""Progress of a stage: at most one event a second, with speed and remaining time."""

import time

from worker.context import StageContext

INTERVAL_S = 1.0


class Progress:
    """Counts steps of one loop and reports them. The remaining time is from the pace since the loop began."""

    def __init__(self, context: StageContext, steps: int, unit: str, done: int = 0) -> None:
        """Begin, with `done` of the steps made by an earlier attempt."""
        self._context, self._steps, self._unit = context, steps, unit
        self.done = self._before = done
        self._tokens = 0
        self._start = self._reported = time.monotonic()

    def step(self, tokens: int = 0) -> None:
        """One step more, of so many tokens; reports when a second has passed, and at the last step."""
        self.go_to(self.done + 1, tokens)

    def go_to(self, done: int, tokens: int = 0) -> None:
        """Steps done by now, and so many tokens more."""
        self.done = done
        self._tokens += tokens
        now = time.monotonic()
        if now - self._reported < INTERVAL_S and self.done < self._steps:
            return
        self._reported = now
        elapsed = max(now - self._start, 1e-9)
        rate = self._tokens / elapsed if self._tokens else None
        eta = elapsed / max(self.done - self._before, 1) * (self._steps - self.done)
        speed = f", {rate:.0f} tokens/s" if rate else ""
        print(f"{self.done}/{self._steps} {self._unit}{speed}, {eta:.0f} s left", flush=True)
        self._context.events.write(
            "progress",
            step=self.done,
            steps=self._steps,
            unit=self._unit,
            tokens_per_s=rate and round(rate, 1),
            eta_s=round(eta, 1),
        )
