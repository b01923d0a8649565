"""Checkpoints judged one after the other while a training goes on, which must not feel it.

    small       in a thread of this process, the lowest in priority: done before a process would have started
    others      in a process of their own, as low in priority, which reads at a modest rate
    hurry       nobody trains any more: at full rate

The process is

    python -P -m worker.judge CHECKPOINT [--previous DIR] [--verifier DIR] [--expect-drafter] [--max-mb-per-s N]

which prints a Verdict as one line of JSON. Torch is loaded where something is judged, not with this module.
"""

import argparse
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from eagle3_core.checkpoint.findings import Verdict
from eagle3_core.contract.priority import be_nice

SMALL_BYTES = 64 << 20
"""Of a checkpoint that a thread reads in less time than a process takes to load torch."""

MB_PER_S_BESIDE_TRAINING = 200.0
"""A drafter of 9.5 GB takes 48 s, of an epoch of half an hour; a training on all cores slows by less than 5 %."""

_VERDICT = TypeAdapter(Verdict)


class JudgeFailed(Exception):
    """The judge's process could not be started, or ended without a verdict; the text says how."""


@dataclass(frozen=True)
class Judged:
    """What came of a checkpoint, and how long it took."""

    path: Path
    verdict: Verdict
    seconds: float


def judging_thread() -> ThreadPoolExecutor:
    """One thread that judges behind all others; torch's threads that it starts are as modest."""
    return ThreadPoolExecutor(1, "judge", initializer=be_nice)


class BackgroundJudge:
    """Judges in the order of asking, and compares each with the sound one before it."""

    def __init__(self, verifier: str | None, *, expect_drafter: bool = True, small_bytes: int = SMALL_BYTES) -> None:
        """Nothing starts before the first checkpoint.

        Args:
            verifier: as for `judge`.
            expect_drafter: as for `judge`.
            small_bytes: a smaller checkpoint is judged in a thread of this process.
        """
        self.previous: Path | None = None
        """What the first one is compared with; then the latest that was sound."""
        self._verifier, self._expect_drafter, self._small = verifier, expect_drafter, small_bytes
        self._thread = judging_thread()
        self._pending: deque[tuple[Path, Future[Judged | None]]] = deque()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._max_mb_per_s: float | None = None
        self._process_is_paced = False

    def __len__(self) -> int:
        """How many were not taken yet."""
        return len(self._pending)

    def submit(self, path: Path, size: int) -> None:
        """Have a checkpoint of `size` bytes judged, beside a training."""
        with self._lock:
            self._max_mb_per_s = MB_PER_S_BESIDE_TRAINING
        self._pending.append((path, self._thread.submit(self._judged, path, size)))

    def ready(self) -> bool:
        """Whether `take` would not wait."""
        return bool(self._pending) and self._pending[0][1].done()

    def take(self) -> Judged | None:
        """The oldest one that was not taken yet, waited for; None if it was removed before it could be judged.

        Raises:
            JudgeFailed: there is no verdict on it.
        """
        return self._pending.popleft()[1].result()

    def hurry(self) -> None:
        """Until the next `submit` nobody trains: judge what is left as fast as the machine can."""
        with self._lock:
            self._max_mb_per_s = None
            if self._process_is_paced:
                self._end_process()  # and it begins again, faster

    def close(self) -> None:
        """End the judge; what was not taken is dropped."""
        with self._lock:
            self._closed = True
            self._end_process()
        self._thread.shutdown(cancel_futures=True)

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _judged(self, path: Path, size: int) -> Judged | None:
        started = time.monotonic()
        while True:
            previous = self.previous if self.previous != path else None
            previous = previous if previous is not None and previous.is_dir() else None
            judged_by = self._here if size < self._small else self._apart
            verdict = judged_by(path, previous)
            if not path.is_dir():
                return None  # who made it clears old ones away
            if previous is None or previous.is_dir():
                break
        if verdict.usable:
            self.previous = path
        return Judged(path, verdict, time.monotonic() - started)

    def _here(self, path: Path, previous: Path | None) -> Verdict:
        from eagle3_core.checkpoint.judge import judge  # noqa: PLC0415 - loads torch

        verifier = None if self._verifier is None else Path(self._verifier)
        return judge(path, previous=previous, verifier=verifier, expect_drafter=self._expect_drafter)

    def _apart(self, path: Path, previous: Path | None) -> Verdict:
        options = [] if previous is None else ["--previous", str(previous)]
        options += [] if self._verifier is None else ["--verifier", self._verifier]
        options += ["--expect-drafter"] if self._expect_drafter else []
        while True:
            with self._lock:
                if self._closed:
                    raise CancelledError
                pace = self._max_mb_per_s
                paced = [] if pace is None else ["--max-mb-per-s", str(pace)]
                command = [sys.executable, "-P", "-m", "worker.judge", *options, *paced, "--", str(path)]
                try:
                    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
                except OSError as error:
                    raise JudgeFailed(f"no judge could be started for {path}: {error}") from error
                self._process, self._process_is_paced = process, pace is not None
            text, _ = process.communicate()
            with self._lock:
                self._process = None
                if process.returncode != 0 and (self._closed or (pace is not None and self._max_mb_per_s is None)):
                    continue  # it was ended from here
            try:
                return _VERDICT.validate_json(text)
            except ValidationError:
                raise JudgeFailed(f"the judge of {path} ended with {process.returncode} and said nothing") from None


def main(arguments: list[str]) -> None:
    """Judge one checkpoint and print the verdict."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--previous", type=Path)
    parser.add_argument("--verifier", type=Path)
    parser.add_argument("--expect-drafter", action="store_true")
    parser.add_argument("--max-mb-per-s", type=float)
    asked = parser.parse_args(arguments)
    be_nice()
    sys.stdout.buffer.write(_VERDICT.dump_json(_judge(asked)) + b"\n")


def _judge(asked: argparse.Namespace) -> Verdict:
    import torch  # noqa: PLC0415 - who only starts this process must not load it

    from eagle3_core.checkpoint.judge import judge  # noqa: PLC0415

    torch.set_num_threads(1)
    return judge(
        asked.checkpoint,
        previous=asked.previous,
        verifier=asked.verifier,
        expect_drafter=asked.expect_drafter,
        max_mb_per_s=asked.max_mb_per_s,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
