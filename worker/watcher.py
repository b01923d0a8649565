"""What surrounds a program that is not ours: its log read for progress, its checkpoints judged as they appear."""

import time
from collections.abc import Iterator
from pathlib import Path

from eagle3_core.contract.params import WatchedParams
from eagle3_core.errors import Diverged, InvalidCheckpoint
from worker.adapters.choose import choose_adapter
from worker.context import StageContext
from worker.follow import LogFollower
from worker.foreign_progress import ForeignProgress
from worker.judge import ChildJudge
from worker.watch import CheckpointWatch, FoundCheckpoint

LOOK_S = 1.0
"""Between two looks at the log; at the directory every second one."""

_NAMED = 3


class Watcher:
    """Looks once a second, from the stage's own loop. Cheap while nothing happens."""

    def __init__(
        self, context: StageContext, params: WatchedParams, log: LogFollower, directory: Path | None, *, present: bool
    ) -> None:
        """Set up; nothing is read yet.

        Args:
            context: of the stage.
            params: what to look for.
            log: of the program.
            directory: where its checkpoints appear.
            present: what log and directory hold already counts too.
        """
        self._context = context
        self._log = log
        self._adapter = choose_adapter(params.progress, context.warn)
        self.progress = ForeignProgress(context, params.total_steps, live=not present)
        self._watch = None if directory is None else CheckpointWatch(directory, pass_over_present=not present)
        self._judge = ChildJudge(params.verifier, params.expect_drafter)
        self._stop_on: dict[str, bool] = {}
        self._next = 0.0
        self._looks = 0
        self._skipped = 0

    def stop_on(self, *, invalid: bool, nonfinite: bool) -> None:
        """Raise when that is seen, instead of warning only."""
        self._stop_on = {"invalid": invalid, "nonfinite": nonfinite}

    def turn(self) -> None:
        """A look, if one is due.

        Raises:
            InvalidCheckpoint, Diverged: as `stop_on` asked for.
        """
        if time.monotonic() < self._next:
            return
        self._read(self._log.lines())
        self.progress.tell()
        if self._watch is not None:
            if self._looks % 2 == 0:
                self._hand_on(self._watch.look())
            self._take_verdict()
        self._looks += 1
        self._next = time.monotonic() + LOOK_S

    def finish(self, succeeded: bool) -> None:
        """Read and judge what is left; a stop that is asked for meanwhile cuts the judging short.

        Raises:
            InvalidCheckpoint, Diverged: as `stop_on` asked for.
        """
        try:
            self._read(self._log.rest())
            self.progress.end(succeeded)
            if self._watch is None:
                return
            self._hand_on(self._watch.look(final=True))
            if not self._judge.idle:
                self._context.phase("judging")
            while not self._judge.idle and not self._context.stop_requested.wait(0.1):
                self._take_verdict()
        finally:
            self.close()

    def close(self) -> None:
        """Let everything go."""
        self._judge.close()
        self._log.close()

    def _read(self, lines: Iterator[str]) -> None:
        for line in lines:
            reading = self._adapter.read(line)
            if reading is not None:
                self.progress.take(reading)
        if self._log.skipped > self._skipped:
            self._skipped = self._log.skipped
            self._context.warn("log_skipped", "the log grows faster than it can be read; parts of it were passed over")
        self.progress.live = True
        if self.progress.nonfinite is not None and self._stop_on.get("nonfinite"):
            raise Diverged(self.progress.nonfinite)

    def _hand_on(self, found: list[FoundCheckpoint]) -> None:
        for one in found:
            self._context.events.write("checkpoint", path=str(one.path), epoch=one.epoch, step=one.step, bytes=one.size)
            self._judge.submit(one)

    def _take_verdict(self) -> None:
        judged = self._judge.poll()
        if judged is None:
            return
        found, answer = judged
        if "failed" in answer:
            self._context.warn("judge_failed", f"{found.path}: {answer['failed']}; see the log")
            return
        self._context.events.write(
            "verdict",
            path=str(found.path),
            verdict=answer["verdict"],
            findings=answer["findings"],
            seconds=answer["seconds"],
        )
        print(f"verdict on {found.path}: {answer['verdict']}", flush=True)
        if answer["verdict"] in ("valid", "suspect"):
            return
        text = f"checkpoint {found.path} is {answer['verdict']}: {_errors(answer['findings'])}"
        if self._stop_on.get("invalid"):
            raise InvalidCheckpoint(text)
        self._context.warn("invalid_checkpoint", text)


def _errors(findings: list[dict[str, str]]) -> str:
    errors = [one["message"] for one in findings if one["severity"] == "error"]
    more = f"; and {len(errors) - _NAMED} more" if len(errors) > _NAMED else ""
    return "; ".join(errors[:_NAMED]) + more
