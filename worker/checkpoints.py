"""Checkpoints of a training run: written between two steps, judged while training goes on."""

import math
import shutil
from pathlib import Path
from typing import Any

from eagle3_core.checkpoint.digest import file_digest
from eagle3_core.checkpoint.format import write_checkpoint
from eagle3_core.checkpoint.write import clear_leftovers, set_aside
from eagle3_core.contract.params import TrainParams
from eagle3_core.contract.store_files import INDEX as STORE_INDEX
from eagle3_core.contract.verifier_files import VerifierFiles
from eagle3_core.errors import InvalidCheckpoint
from eagle3_core.training.resume import checkpoints, describe_position, move_aside
from eagle3_core.training.setup import Shape
from eagle3_core.training.trainer import Trainer
from worker.context import StageContext
from worker.judge import BackgroundJudge, JudgeFailed
from worker.retention import VAL_LOSS, best_link_fault, mark_best, needless

MOST_UNJUDGED = 2
"""Checkpoints a training may be ahead of the judge, who gives way to it: old ones go only when newer ones are sound."""


class CheckpointKeeper:
    """Writes, has judged and clears away. Not to be shared between threads."""

    def __init__(self, context: StageContext, params: TrainParams, files: VerifierFiles, shape: Shape) -> None:
        self._context, self._params, self._files, self._shape = context, params, files, shape
        self._judge = BackgroundJudge(params.verifier)
        self.latest: Path | None = None
        self.latest_step = 0
        self._unsound: set[Path] = set()
        self._store = file_digest(Path(params.data_dir) / STORE_INDEX)
        for path in clear_leftovers(context.output_dir):
            context.events.write("checkpoint_removed", path=str(path), why="an earlier attempt was ended meanwhile")
        if fault := best_link_fault(context.output_dir):
            context.warn("best_link", fault)

    def save(self, name: str, trainer: Trainer, val_loss: float | None = None) -> None:
        """Write `name` in the output directory and hand it to the judge; nothing to do when it is there already.

        Args:
            name: of the directory.
            trainer: what is saved.
            val_loss: of the epoch that it ends, in nats.
        """
        if self._is_there(self._context.output_dir / name, trainer.step):
            return
        if len(self._judge) >= MOST_UNJUDGED:
            self._wait(MOST_UNJUDGED - 1, self._params.on_invalid_checkpoint == "stop")
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
            extra=self._extra(trainer, val_loss),
        )
        size = sum(file.stat().st_size for file in path.iterdir())
        self._context.events.write("checkpoint", path=str(path), epoch=epoch, step=trainer.step, bytes=size)
        print(f"checkpoint {path}: {size / 1e6:.1f} MB", flush=True)
        self._judge.submit(path, size)
        self.latest, self.latest_step = path, trainer.step

    def _is_there(self, path: Path, step: int) -> bool:
        """Whether that checkpoint exists; what else bears its name is moved out of the way."""
        if any((step, path) == (there, one) for there, one, _ in checkpoints(path.parent)):
            return True  # stopped again at the very step it had gone on from
        if path.exists() or path.is_symlink():
            self._context.warn(
                "name_taken", f"{path} is no checkpoint of this step, and was renamed {move_aside(path)}"
            )
        return False

    def go_on_from(self, path: Path, step: int) -> None:
        """The checkpoint that a further attempt starts at: sound, though perhaps nobody was told so yet."""
        self.latest, self.latest_step = path, step
        self._judge.previous = path
        self._mark_best(path)

    def poll(self) -> None:
        """Take the verdicts that are there.

        Raises:
            InvalidCheckpoint: one is bad, and the job was asked to stop then.
        """
        while self._judge.ready():
            self._take(self._params.on_invalid_checkpoint == "stop")

    def finish(self, stop_on_invalid: bool = True) -> None:
        """Wait for every verdict; as `poll`."""
        if len(self._judge):
            self._wait(0, stop_on_invalid and self._params.on_invalid_checkpoint == "stop")

    def close(self) -> None:
        """Let the judge go; verdicts that were not taken are dropped."""
        self._judge.close()

    def _wait(self, left: int, stop_on_invalid: bool) -> None:
        """Until so many are not judged."""
        self._context.phase("judging")
        self._judge.hurry()
        while len(self._judge) > left:
            self._take(stop_on_invalid)

    def _extra(self, trainer: Trainer, val_loss: float | None) -> dict[str, Any]:
        return {
            "overrides": self._shape.overrides,
            "finetune_from": self._params.finetune_from,
            "training": self._params.model_dump(mode="json"),
            "store": self._store,
            "position": describe_position(trainer.position),
            VAL_LOSS: val_loss if val_loss is not None and math.isfinite(val_loss) else None,
        }

    def _take(self, stop_on_invalid: bool) -> None:
        """Report a verdict; a sound checkpoint may be the best so far, and may make older ones needless."""
        try:
            judged = self._judge.take()
        except JudgeFailed as error:  # no reason to end a training
            self._context.warn("judge_failed", f"{error}; see the log")
            return
        if judged is None:
            return
        path, verdict = judged.path, judged.verdict
        self._context.events.write("verdict", path=str(path), **verdict.to_dict(), seconds=round(judged.seconds, 3))
        print(f"verdict on {path.name}: {verdict.verdict}", flush=True)
        if verdict.usable:
            self._mark_best(path)
            self._remove_needless(path)
            return
        self._unsound.add(path)
        if stop_on_invalid:
            raise InvalidCheckpoint(f"checkpoint {path} is {verdict.verdict}: {verdict.errors()}")
        self._context.warn("invalid_checkpoint", f"{path}: {verdict.errors()}")

    def _mark_best(self, path: Path) -> None:
        try:
            if mark_best(path):
                print(f"best so far: {path.name}", flush=True)
        except OSError as error:  # no reason to end a training
            self._context.warn("best_link", f"no checkpoint can be marked as the best: {error}")

    def _remove_needless(self, sound: Path) -> None:
        for path, why in needless(sound, self._params.keep_last, self._params.keep_every, self._unsound):
            try:
                aside = set_aside(path)
                self._context.events.write("checkpoint_removed", path=str(path), why=why)
                shutil.rmtree(aside)
            except OSError as error:  # no reason to end a training
                self._context.warn("checkpoint_not_removed", f"{path} cannot be removed: {error}")
            else:
                print(f"removed checkpoint {path.name}: {why}", flush=True)
