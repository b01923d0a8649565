"""The judge's deep level: the drafter is run on stored states, and a resumed training makes a step.

    loss, accuracy      over the rows that training held out, or the first rows of the store
    agreement           with the loss that training recorded in the manifest, where it was measured on this store
    resume              weights, optimizer and schedule go into a fresh trainer, which takes one step on a copy

It needs the drafter in memory, beside the verifier's embedding and head. Nothing on disk is changed.
"""

import math
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from eagle3_core.checkpoint.digest import file_digest
from eagle3_core.checkpoint.drafter import load_drafter
from eagle3_core.checkpoint.findings import Report, Verdict
from eagle3_core.checkpoint.judge import judge
from eagle3_core.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from eagle3_core.checkpoint.quick import checkpoint_directory
from eagle3_core.contract.params import TrainParams
from eagle3_core.contract.store_files import INDEX
from eagle3_core.contract.verifier_files import read_verifier_files
from eagle3_core.data.split import split_by_prompt
from eagle3_core.data.store import HiddenStateStore
from eagle3_core.errors import BadData, BadInput, Eagle3Error
from eagle3_core.training.resume import Found, restore
from eagle3_core.training.setup import make_target_head
from eagle3_core.training.trainer import Trainer
from eagle3_core.training.ttt import counted_rows
from eagle3_core.verifier.tensors import load_verifier_weights

TOLERANCE = 0.03
"""Of the recorded loss, or as many nats where that is below one: weights are stored as bfloat16, training is not."""

MOST_ROWS = 64
"""Rows that are run where training recorded none."""

_RESUMED_ROWS = 1


def judge_deep(
    path: Path, *, verifier: Path, store: Path, previous: Path | None = None, max_mb_per_s: float | None = None
) -> Verdict:
    """The verdict on a checkpoint directory, forward pass and resume included.

    What is invalid at level full is not run; the verdict then says full.

    Args:
        path: checkpoint directory, or an output directory, whose latest epoch is judged.
        verifier: directory of the verifier.
        store: hidden-state store of that verifier; best the one that training used.
        previous: checkpoint of the epoch before.
        max_mb_per_s: read the checkpoint no faster than that.
    """
    verdict = judge(path, previous=previous, verifier=verifier, max_mb_per_s=max_mb_per_s)
    if not verdict.usable or not path.is_dir():
        return verdict
    report = Report(path, list(verdict.findings), servers=verdict.servers)
    directory = checkpoint_directory(Report(path), path)
    assert directory is not None, "it was judged"
    manifest = read_manifest(directory)
    try:
        _Deep(report, directory, verifier, store, manifest if isinstance(manifest, Manifest) else None).run()
    except BadData as error:
        report.add("store_unreadable", str(error))
    except BadInput as error:
        report.add("no_forward_pass", str(error).removeprefix(f"{directory}: "))
    return report.verdict("deep")


class _Deep:
    """One deep look."""

    def __init__(self, report: Report, path: Path, verifier: Path, store: Path, manifest: Manifest | None) -> None:
        self._report, self._path, self._manifest = report, path, manifest
        self._store = HiddenStateStore(store)
        self._files = read_verifier_files(verifier)
        self._extra: dict[str, Any] = {} if manifest is None else manifest.extra
        self._params = self._training_params(verifier, store)
        self._same_store = self._extra.get("store") == file_digest(store / INDEX)

    def run(self) -> None:
        drafter = load_drafter(self._path, self._files, torch.device("cpu"))
        ids = drafter.config.aux_layer_ids
        if self._store.meta.hidden_size != self._files.hidden_size or (
            ids is not None and ids != self._store.meta.layer_ids
        ):
            raise BadData(
                f"the store holds states {list(self._store.meta.layer_ids)} of width {self._store.meta.hidden_size}, "
                f"the drafter takes {list(ids or ())} of width {self._files.hidden_size}"
            )
        train_rows, val_rows = self._rows()
        weights = load_verifier_weights(self._files, drafter.draft_to_target())
        head = make_target_head(weights, self._store.meta.last_state, torch.device("cpu"))
        trainer = Trainer(self._params, drafter, head, self._store, train_rows, val_rows, torch.device("cpu"))
        self._judge_metrics(trainer.validate(lambda: None), drafter.config.draft_vocab_size)
        self._judge_resume(trainer)

    def _training_params(self, verifier: Path, store: Path) -> TrainParams:
        """What the run was asked for, as its manifest has it, with the paths given now; else the defaults."""
        places = {
            "verifier": str(verifier),
            "data_dir": str(store),
            "vocab_map_dir": str(self._path),
            "finetune_from": None,
            "num_workers": 0,
            "device": "cpu",
            "epochs": 1,
        }
        recorded = self._extra.get("training")
        try:
            return TrainParams.model_validate({**(recorded if isinstance(recorded, dict) else {}), **places})
        except ValidationError:
            return TrainParams.model_validate(places)

    def _rows(self) -> tuple[list[int], list[int]]:
        """Rows to resume on and rows to run: those that training held out, where it is known which."""
        masks = self._store.masks(self._params.max_seq_len)
        usable = [bool(counted_rows(mask, self._params.ttt_steps)[0].any()) for _, mask in masks]
        rows = [row for row, counts in enumerate(usable) if counts]
        if not rows:
            raise BadData("the store holds no row with an answer")
        if self._same_store:
            prompts = [entry.prompt for entry in self._store.entries]
            held_out = split_by_prompt(prompts, self._params.val_ratio, self._params.seed)[1]
            if chosen := [row for row in held_out if usable[row]]:
                return rows[:_RESUMED_ROWS], chosen
        return rows[:_RESUMED_ROWS], rows[:MOST_ROWS]

    def _judge_metrics(self, metrics: dict[str, Any] | None, draft_vocab_size: int) -> None:
        assert metrics is not None, "there are rows"
        loss, first = metrics["loss"], metrics["loss_per_step"][0]
        accuracy = ", ".join("none" if each is None else f"{each:.3f}" for each in metrics["accuracy"])
        self._report.add(
            "measured", f"loss {loss:.4f} nats, accuracy by step {accuracy}, over {metrics['rows'][0]} positions"
        )
        if not math.isfinite(loss):
            self._report.add("loss_not_finite", f"the loss over stored states is {loss}")
            return
        if first is not None and first > math.log(draft_vocab_size):
            self._report.add(
                "worse_than_chance",
                f"the loss of the first step is {first:.3f} nats; guessing among {draft_vocab_size} tokens gives "
                f"{math.log(draft_vocab_size):.3f}",
            )
        recorded = self._recorded_loss()
        if recorded is not None and abs(loss - recorded) > TOLERANCE * max(1.0, abs(recorded)):
            self._report.add(
                "training_disagrees",
                f"the loss over the held-out rows is {loss:.4f} nats, training recorded {recorded:.4f}",
                file=self._path / MANIFEST_NAME,
            )

    def _recorded_loss(self) -> float | None:
        """The loss over these rows that training recorded, where it was measured in the same way."""
        recorded = self._extra.get("val_loss")
        # Rows that were skipped for their targets would need the verifier's whole head here.
        alike = self._same_store and dict(self._params).get("outside_vocab") != "skip"
        return recorded if alike and isinstance(recorded, float) else None

    def _judge_resume(self, trainer: Trainer) -> None:
        """Load everything as a resumed run does, and make one step."""
        if self._manifest is None or self._manifest.step is None or "position" not in self._extra:
            return
        found = Found(self._path, self._manifest.step, self._extra["position"])
        before = {name: parameter.detach().clone() for name, parameter in trainer.drafter.named_parameters()}
        try:
            restore(trainer, found)
            rate = float(trainer.optimizer.param_groups[0]["lr"])
            if not math.isfinite(rate) or rate < 0:
                raise BadInput(f"the learning rate would be {rate}")
            trainer.next_epoch()
            trainer.train_epoch(lambda _: None)
        except (Eagle3Error, OSError) as error:
            self._report.add("resume_fails", str(error).removeprefix(f"{self._path}: "), file=self._path)
            return
        still = all(torch.equal(before[name], value) for name, value in trainer.drafter.named_parameters())
        if still and rate > 0:
            self._report.add("resume_fails", f"a step at learning rate {rate:g} changes nothing", file=self._path)
        else:
            self._report.add("measured", f"a resumed run goes on from step {found.step} at learning rate {rate:g}")
