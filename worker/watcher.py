"""What surrounds a program that is not ours: its log read for progress, its checkpoints judged as they appear."""

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3_core.contract.params import WatchedParams
from eagle3_core.errors import Diverged, InvalidCheckpoint
from worker.adapters.choose import choose_adapter
from worker.context import StageContext
from worker.follow import LogFollower
from worker.foreign_progress import ForeignProgress
from worker.judge import BackgroundJudge, Judged, JudgeFailed
from worker.watch import CheckpointWatch, FoundCheckpoint

READ_S = 1.0
"""Between two looks at the log."""

LOOK_S = 2.0
"""Between two looks at the directory, at least."""

LOOK_SHARE = 0.05
"""Of the time may go into looking at a directory."""


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
        self._params = params
        self._directory = directory
        self._seen_progress = self._seen_checkpoint = False
        self._log = log
        self._adapter = choose_adapter(params.progress, context.warn)
        self.progress = ForeignProgress(context, params.total_steps, live=not present)
        self._watch = None if directory is None else CheckpointWatch(directory, pass_over_present=not present)
        # Whatever its size, a process judges it: this one surrounds any program and must not load torch.
        self._judge = BackgroundJudge(params.verifier, expect_drafter=params.expect_drafter, small_bytes=0)
        self._stop_on: dict[str, bool] = {}
        self._untold: deque[tuple[str, dict[str, Any]]] = deque()
        self._next_read = self._next_look = 0.0
        self._skipped = 0
        self._confused = False

    def stop_on(self, *, invalid: bool, nonfinite: bool) -> None:
        """Raise when that is seen, instead of warning only."""
        self._stop_on = {"invalid": invalid, "nonfinite": nonfinite}

    def turn(self) -> None:
        """A look, if one is due. While the disk is full nothing is told; that is no reason to fail the program.

        Raises:
            InvalidCheckpoint, Diverged: as `stop_on` asked for.
        """
        if time.monotonic() < self._next_read:
            return
        self._next_read = time.monotonic() + READ_S
        with contextlib.suppress(OSError):
            self._read(self._log.lines())
            self.progress.tell()
            if self._watch is not None:
                self._look(self._watch)
                self._take_verdict()

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
            self._tell()
            if len(self._judge):
                self._context.phase("judging")
                self._judge.hurry()
            while len(self._judge) and not self._context.stop_requested.wait(0.1):
                self._take_verdict()
        finally:
            self.close()

    def tell_what_was_missed(self, watch: str | None) -> None:
        """Warn where what was asked for never came, a checkpoint in `watch` or progress: either may be mistaken."""
        if watch is not None and not self._seen_checkpoint:
            text = f"no checkpoint appeared in {self._directory}; does the program write elsewhere?"
            self._context.warn("no_checkpoint_seen", text)
        asked = self._params.progress
        if asked not in ("auto", "none") and not self._seen_progress:
            form = asked if isinstance(asked, str) else repr(asked["regex"])
            self._context.warn(
                "no_progress_seen", f"no line of the output is of the format {form}; see docs/external.md"
            )

    def close(self) -> None:
        """Let everything go."""
        self._judge.close()
        self._log.close()

    def _read(self, lines: Iterator[str]) -> None:
        for line in lines:
            try:
                reading = self._adapter.read(line)
            except (ArithmeticError, LookupError, ValueError) as error:
                self._cannot_read(line, error)
                continue
            if reading is not None:
                self._seen_progress = True
                self.progress.take(reading)
        if self._log.skipped > self._skipped:
            self._skipped = self._log.skipped
            self._context.warn("log_skipped", "the log grows faster than it can be read; parts of it were passed over")
        self.progress.live = True
        if self.progress.nonfinite is not None and self._stop_on.get("nonfinite"):
            raise Diverged(self.progress.nonfinite)

    def _cannot_read(self, line: str, error: Exception) -> None:
        """A fault of ours, and none that should cost somebody a training."""
        if not self._confused:
            self._confused = True
            text = f"a line of the output could not be read ({type(error).__name__}: {error}): {line[:200]!r}"
            self._context.warn("progress_unreadable", text)

    def _look(self, watch: CheckpointWatch) -> None:
        """At the directory, the more seldom the longer it takes."""
        began = time.monotonic()
        if began < self._next_look:
            return
        self._hand_on(watch.look())
        now = time.monotonic()
        self._next_look = now + max(LOOK_S, (now - began) / LOOK_SHARE)

    def _hand_on(self, found: list[FoundCheckpoint]) -> None:
        for one in found:
            self._seen_checkpoint = True
            told = {"path": str(one.path), "epoch": one.epoch, "step": one.step, "bytes": one.size}
            self._untold.append(("checkpoint", told))
            self._judge.submit(one.path, one.size)

    def _tell(self) -> None:
        """Write what is known of checkpoints; on a full disk it stays for later."""
        while self._untold:
            kind, fields = self._untold[0]
            self._context.events.write(kind, **fields)
            self._untold.popleft()

    def _take_verdict(self) -> None:
        self._tell()
        if not self._judge.ready():
            return
        try:
            judged = self._judge.take()
        except JudgeFailed as error:
            self._warn_later("judge_failed", f"{error}; see the log")
        else:
            if judged is not None:
                self._note(judged)
        self._tell()

    def _note(self, judged: Judged) -> None:
        path, verdict = judged.path, judged.verdict
        told = {"path": str(path), **verdict.to_dict(), "seconds": round(judged.seconds, 3)}
        self._untold.append(("verdict", told))
        if verdict.usable:
            return
        text = f"checkpoint {path} is {verdict.verdict}: {verdict.errors()}"
        if self._stop_on.get("invalid"):
            self._tell()
            raise InvalidCheckpoint(text)
        self._warn_later("invalid_checkpoint", text)

    def _warn_later(self, code: str, message: str) -> None:
        self._untold.append(("warning", {"code": code, "message": message}))
