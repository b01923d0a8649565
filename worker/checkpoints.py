"""Checkpoints of a training run: written between two steps, judged in a thread while training goes on."""

import shutil
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_core.checkpoint.format import write_checkpoint
from eagle3_core.checkpoint.judge import Verdict, judge
from eagle3_core.contract.params import TrainParams
from eagle3_core.contract.verifier_files import VerifierFiles
from eagle3_core.errors import InvalidCheckpoint
from eagle3_core.training.resume import WITHIN_EPOCH, checkpoints, describe_position
from eagle3_core.training.setup import Shape
from eagle3_core.training.trainer import Trainer
from worker.context import StageContext


@dataclass(frozen=True)
class _Judging:
    """A checkpoint that lies with the judge: its path, and what comes of it with the seconds it took."""

    path: Path
    step: int
    outcome: Future[tuple[Verdict, float]]


class CheckpointKeeper:
    """Writes, has judged and clears away. Not to be shared between threads."""

    def __init__(self, context: StageContext, params: TrainParams, files: VerifierFiles, shape: Shape) -> None:
        self._context, self._params, self._files, self._shape = context, params, files, shape
        # One thread: verdicts come in the order of the checkpoints, and each is compared with the one before.
        self._judge = ThreadPoolExecutor(1, "judge")
        self._pending: deque[_Judging] = deque()
        self.latest: Path | None = None
        self.latest_step = 0

    def save(self, name: str, trainer: Trainer) -> None:
        """Write `name` in the output directory and hand it to the judge; nothing to do when it is there already."""
        if (self._context.output_dir / name).exists():
            return  # stopped again at the very step it had gone on from
        self._context.phase("saving")
        epoch = int(name) if name.isdigit() else trainer.position.epoch
        path = write_checkpoint(
            self._context.output_dir,
            name,
            epoch=epoch,
            config=self._shape.config,
            tensors=trainer.drafter.state_dict(),
            optimizer_state=trainer.optimizer.state_dict(),
            scheduler_state=trainer.scheduler.state_dict(),
            verifier_name=self._params.verifier,
            verifier_architectures=list(self._files.architectures),
            speculative_tokens=self._params.speculative_tokens,
            step=trainer.step,
            extra=self._extra(trainer),
        )
        size = sum(file.stat().st_size for file in path.iterdir())
        self._context.events.write("checkpoint", path=str(path), epoch=epoch, step=trainer.step, bytes=size)
        print(f"checkpoint {path}: {size / 1e6:.1f} MB", flush=True)
        self._pending.append(_Judging(path, trainer.step, self._judge.submit(self._judged, path, self.latest)))
        self.latest, self.latest_step = path, trainer.step

    def poll(self) -> None:
        """Take the verdicts that are there.

        Raises:
            InvalidCheckpoint: one is bad, and the job was asked to stop then.
        """
        while self._pending and self._pending[0].outcome.done():
            self._take(self._pending.popleft(), self._params.on_invalid_checkpoint == "stop")

    def finish(self, stop_on_invalid: bool = True) -> None:
        """Wait for every verdict; as `poll`."""
        if self._pending:
            self._context.phase("judging")
        while self._pending:
            self._take(self._pending.popleft(), stop_on_invalid and self._params.on_invalid_checkpoint == "stop")

    def close(self) -> None:
        """Let the thread go; verdicts that were not taken are dropped."""
        self._judge.shutdown(cancel_futures=True)

    def _extra(self, trainer: Trainer) -> dict[str, Any]:
        return {
            "overrides": self._shape.overrides,
            "finetune_from": self._params.finetune_from,
            "position": describe_position(trainer.position),
        }

    def _judged(self, path: Path, previous: Path | None) -> tuple[Verdict, float]:
        started = time.monotonic()
        verdict = judge(path, previous=previous, verifier=Path(self._params.verifier))
        return verdict, time.monotonic() - started

    def _take(self, judging: _Judging, stop_on_invalid: bool) -> None:
        """Report a verdict, and remove checkpoints within epochs that a sound later one makes needless."""
        verdict, seconds = judging.outcome.result()
        path = judging.path
        self._context.events.write(
            "verdict",
            path=str(path),
            verdict=verdict.verdict,
            findings=[finding.to_dict() for finding in verdict.findings],
            seconds=round(seconds, 3),
        )
        print(f"verdict on {path.name}: {verdict.verdict}", flush=True)
        if verdict.usable:
            for step, older, _ in checkpoints(self._context.output_dir):
                if older.name.startswith(WITHIN_EPOCH) and step <= judging.step and older != path:
                    shutil.rmtree(older)
        elif stop_on_invalid:
            raise InvalidCheckpoint(f"checkpoint {path} is {verdict.verdict}: {verdict.errors()}")
        else:
            self._context.warn("invalid_checkpoint", f"{path}: {verdict.errors()}")
