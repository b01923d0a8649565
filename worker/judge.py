"""Judging a checkpoint in a process of its own, so that whoever watches a program never loads torch.

    python -P -m worker.judge CHECKPOINT [--previous DIR] [--verifier DIR] [--expect-drafter] [--max-mb-per-s N]

prints {"verdict", "level", "findings", "servers", "seconds"} as one line of JSON. It takes what the machine has left:
the lowest priority, one thread that computes and one that reads.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from eagle3_core.contract.priority import be_nice, step_back
from worker.watch import FoundCheckpoint


def judging_thread() -> ThreadPoolExecutor:
    """One thread that judges behind all others; torch's threads that it starts are as modest."""
    return ThreadPoolExecutor(1, "judge", initializer=be_nice)


@dataclass(frozen=True)
class _Judging:
    found: FoundCheckpoint
    previous: Path | None
    process: subprocess.Popen[bytes]
    answer: IO[bytes]


class ChildJudge:
    """Judges one checkpoint after the other, each compared with the sound one before it."""

    def __init__(self, verifier: str | None, expect_drafter: bool) -> None:
        self._options = [] if verifier is None else ["--verifier", verifier]
        self._options += ["--expect-drafter"] if expect_drafter else []
        self._waiting: deque[FoundCheckpoint] = deque()
        self._running: _Judging | None = None
        self._previous: Path | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is left to be judged."""
        return self._running is None and not self._waiting

    def submit(self, found: FoundCheckpoint) -> None:
        """Have a checkpoint judged."""
        self._waiting.append(found)

    def poll(self) -> tuple[FoundCheckpoint, dict[str, Any]] | None:
        """A checkpoint that has been judged, and the answer; one that was removed meanwhile is passed over.

        An answer of a judge that died is {"failed": text}.
        """
        judged = None
        if self._running is not None and self._running.process.poll() is not None:
            judging, self._running = self._running, None
            judged = self._judged(judging)
        if self._running is None and self._waiting:
            self._start(self._waiting[0])
            self._waiting.popleft()
        return judged

    def close(self) -> None:
        """End the judge; what it had not told is dropped."""
        self._waiting.clear()
        if self._running is not None:
            self._running.process.kill()
            self._running.process.wait()
            self._running.answer.close()
            self._running = None

    def _start(self, found: FoundCheckpoint) -> None:
        previous = self._previous
        if previous is None or previous == found.path or not previous.is_dir():
            previous = None
        options = self._options if previous is None else [*self._options, "--previous", str(previous)]
        answer = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the answer was read
        command = [sys.executable, "-P", "-m", "worker.judge", *options, "--", str(found.path)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=answer)
        self._running = _Judging(found, previous, process, answer)

    def _judged(self, judging: _Judging) -> tuple[FoundCheckpoint, dict[str, Any]] | None:
        with judging.answer as file:
            file.seek(0)
            text = file.read()
        found = judging.found
        if not found.path.is_dir():
            return None  # the program clears old ones away
        if judging.previous is not None and not judging.previous.is_dir():
            self._waiting.appendleft(found)  # what it was compared with went away
            return None
        try:
            answer: dict[str, Any] = json.loads(text)
        except ValueError:
            return found, {"failed": f"the judge ended with {judging.process.returncode} and said nothing"}
        if answer["verdict"] in ("valid", "suspect"):
            self._previous = found.path
        return found, answer


def main(arguments: list[str]) -> None:
    """Judge one checkpoint and print the answer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--previous", type=Path)
    parser.add_argument("--verifier", type=Path)
    parser.add_argument("--expect-drafter", action="store_true")
    parser.add_argument("--max-mb-per-s", type=float)
    asked = parser.parse_args(arguments)
    step_back()
    started = time.monotonic()
    verdict = _judge(asked)
    print(json.dumps({**verdict, "seconds": round(time.monotonic() - started, 3)}))


def _judge(asked: argparse.Namespace) -> dict[str, Any]:
    import torch  # noqa: PLC0415 - the watcher imports this module and must not load it

    from eagle3_core.checkpoint.judge import judge  # noqa: PLC0415

    torch.set_num_threads(1)
    return judge(
        asked.checkpoint,
        previous=asked.previous,
        verifier=asked.verifier,
        expect_drafter=asked.expect_drafter,
        max_mb_per_s=asked.max_mb_per_s,
    ).to_dict()


if __name__ == "__main__":
    main(sys.argv[1:])
