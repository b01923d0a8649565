"""train: hidden states -> an EAGLE-3 drafter; one judged checkpoint an epoch."""

import math
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle3_core.checkpoint.format import DrafterSource
from eagle3_core.checkpoint.judge import judge
from eagle3_core.contract.params import TrainParams
from eagle3_core.contract.prepared_files import MANIFEST, load_manifest
from eagle3_core.contract.verifier_files import VerifierFiles, config_fingerprint, read_verifier_files
from eagle3_core.data.split import split_by_prompt
from eagle3_core.data.store import HiddenStateStore
from eagle3_core.errors import BadData, CheckpointError
from eagle3_core.training.outside import Outside, count_outside, make_outside
from eagle3_core.training.resume import WITHIN_EPOCH, find_latest, move_aside, restore
from eagle3_core.training.setup import (
    build_drafter,
    choose_vocab_map,
    make_target_head,
    read_source,
    resolve_shape,
)
from eagle3_core.training.trainer import StepReport, Trainer
from eagle3_core.training.ttt import counted_rows
from eagle3_core.verifier.tensors import load_verifier_weights, output_fingerprint
from worker.checkpoints import CheckpointKeeper
from worker.context import StageContext, StageResult, Stopped
from worker.device import pick_device
from worker.progress import INTERVAL_S


@dataclass
class Run:
    """Everything one training run holds."""

    params: TrainParams
    trainer: Trainer
    keeper: CheckpointKeeper
    saved_for: str | None = None
    began: tuple[float, int] = (0.0, 0)
    """When the first step of this attempt began, and how many came before it."""

    def left_s(self, step: int) -> float:
        """Seconds left after a step, at the pace of the attempt so far, validating and saving included."""
        began_s, before = self.began
        return (time.monotonic() - began_s) / (step - before) * (self.trainer.total_steps - step)


def run(context: StageContext) -> StageResult:
    """Train for the asked number of epochs, going on from the latest sound checkpoint of this job if there is one."""
    params = context.params
    assert isinstance(params, TrainParams)
    context.phase("loading")
    training = _set_up(context, params)
    with closing(training.keeper):
        _go_on(context, training)
        training.began = (time.monotonic(), training.trainer.step)
        epochs = _train(context, training)
        training.keeper.finish()
    checkpoint = str(training.keeper.latest)
    data = {"epochs": epochs, "checkpoint": checkpoint, "steps": training.trainer.step}
    return StageResult(data, {"checkpoint": checkpoint})


def _train(context: StageContext, training: Run) -> list[dict[str, Any]]:
    """Every epoch that is left; returns their metrics. A stop is obeyed between steps, with the work saved."""
    trainer, keeper = training.trainer, training.keeper
    epochs: list[dict[str, Any]] = []
    while trainer.position.epoch < training.params.epochs:
        try:
            epochs.append(_one_epoch(context, training))
        except Stopped:
            if context.save_when_stopped():
                keeper.save(f"{WITHIN_EPOCH}{trainer.step}", trainer)
                keeper.finish(stop_on_invalid=False)
            raise
        name = str(trainer.position.epoch)
        trainer.next_epoch()
        val = epochs[-1]["val"]
        keeper.save(name, trainer, None if val is None else val["loss"])
    return epochs


def _go_on(context: StageContext, training: Run) -> None:
    """Bring back the state of this job's latest sound checkpoint, and move unsound ones out of the way."""
    found, passed_over = find_latest(context.output_dir)
    for path, why in passed_over:
        context.warn("checkpoint_passed_over", f"{path} is not gone on from, and renamed: {why}")
        move_aside(path)
    if found is None:
        return
    restore(training.trainer, found)
    training.keeper.go_on_from(found.path, found.step)
    position = training.trainer.position
    context.report(
        "resumed",
        f"from {found.path} at step {found.step}: epoch {position.epoch}, {position.rows_done} rows of it done",
        path=str(found.path),
        step=found.step,
        epoch=position.epoch,
        rows_done=position.rows_done,
    )


def _set_up(context: StageContext, params: TrainParams) -> Run:
    """Read everything, check that it fits together, and say what was found."""
    files = read_verifier_files(Path(params.verifier))
    for code, message in files.warnings:
        context.warn(code, message)
    store = HiddenStateStore(Path(params.data_dir))
    _compare_verifier(context, params, store, files)
    _judge_source(context, params)
    source = read_source(params)
    vocab_map = choose_vocab_map(params, files, None if source is None else source[1])
    shape = resolve_shape(params, files, store.meta, None if source is None else source[0], len(vocab_map.d2t_D))
    for override in shape.overrides:
        context.warn("source_mismatch_allowed", override)
    _warn_of_gaps(context, params, store, source)
    context.report(
        "vocabulary map",
        f"d2t {list(vocab_map.d2t_D.shape)}, t2d {list(vocab_map.t2d_V.shape)}, {int(vocab_map.t2d_V.sum())} kept, "
        f"covers {vocab_map.coverage:.2%} of the counted tokens",
        draft_vocab_size=len(vocab_map.d2t_D),
        vocab_size=files.vocab_size,
        coverage=round(vocab_map.coverage, 6),
    )
    weights = load_verifier_weights(files, vocab_map.target_ids_D)
    for line in weights.describe():
        context.report("read", line)
    if source is not None:
        for note in source[0].notes:
            context.report("finetune_from config", note)
    device = pick_device(params.device)
    drafter = build_drafter(shape, vocab_map, weights, source, params.seed, context.report).to(device)
    train_rows, val_rows = _split(context, params, store)
    head = make_target_head(weights, store.meta.last_state, device)
    outside = make_outside(files, vocab_map, weights, head, store.meta.last_state, device)
    if outside is not None and params.outside_vocab == "keep":
        _count_outside(context, params, store, val_rows or train_rows[: len(train_rows) // 10 + 1], outside)
        outside = None
    elif outside is not None:
        _count_outside(context, params, store, train_rows, outside)
    trainer = Trainer(params, drafter, head, store, train_rows, val_rows, device, outside)
    if shape.config.own_embedding:
        context.warn(
            "own_embedding",
            "the drafter's embedding is its own: serve it with vLLM, SGLang puts the verifier's in its place",
        )
    total = sum(p.numel() for p in drafter.parameters())
    trained = trainer.trained_parameters()
    context.report("parameters", f"{total:,} in all, {trained:,} trained", total=total, trainable=trained)
    context.report(
        "samples", f"{len(train_rows)} train, {len(val_rows)} validation", train=len(train_rows), val=len(val_rows)
    )
    context.report(
        "steps",
        f"{trainer.total_steps} in {params.epochs} epochs, {trainer.warmup} of them warm-up",
        total=trainer.total_steps,
        warmup=trainer.warmup,
        epochs=params.epochs,
    )
    return Run(params, trainer, CheckpointKeeper(context, params, files, shape))


def _compare_verifier(
    context: StageContext, params: TrainParams, store: HiddenStateStore, files: VerifierFiles
) -> None:
    """Say so where the states are not this verifier's, as far as its config and its last parts tell."""
    if store.meta.config_fingerprint != config_fingerprint(Path(params.verifier)):
        context.warn(
            "verifier_differs",
            f"data_dir was extracted from {store.meta.verifier}, whose config is not that of {params.verifier}",
        )
    elif store.meta.output_fingerprint not in (None, output_fingerprint(files)):
        context.warn(
            "verifier_differs",
            f"data_dir was extracted from {store.meta.verifier}, whose embedding, head or final norm has other values "
            f"than that of {params.verifier}: targets would be another verifier's",
        )


def _judge_source(context: StageContext, params: TrainParams) -> None:
    """Refuse to start from a drafter that is judged invalid; say what is suspect."""
    if params.finetune_from is None:
        return
    verdict = judge(Path(params.finetune_from))
    if not verdict.usable:
        raise CheckpointError(f"finetune_from {params.finetune_from} is {verdict.verdict}: {verdict.errors()}")
    for finding in verdict.findings:
        if finding.severity == "warning":
            context.warn(finding.code, f"finetune_from {params.finetune_from}: {finding.message}")


def _warn_of_gaps(
    context: StageContext,
    params: TrainParams,
    store: HiddenStateStore,
    source: tuple[DrafterSource, dict[str, Tensor]] | None,
) -> None:
    """Say what could not be compared, or differs without being wrong for certain."""
    held = list(store.meta.layer_ids)
    if source is not None and source[0].config.aux_layer_ids is None and not source[0].captured_after:
        context.warn(
            "aux_ids_not_stated",
            f"finetune_from {params.finetune_from} does not say which states it was made for; it is fed those "
            f"entering layers {held} now, and starts anew if it learned on others",
        )
    directory = Path(params.vocab_map_dir or "")
    if params.vocab_map_dir is not None and (directory / MANIFEST).exists():
        manifest = load_manifest(directory)
        if manifest.tokenizer_fingerprint != store.meta.tokenizer_fingerprint:
            context.warn(
                "vocabulary_map_differs",
                f"vocab_map_dir was prepared with the tokenizer of {manifest.verifier}, data_dir with that of "
                f"{store.meta.verifier}: its draft ids may stand for other tokens",
            )


def _split(context: StageContext, params: TrainParams, store: HiddenStateStore) -> tuple[list[int], list[int]]:
    """Rows with something to train, on both sides of the validation split."""
    usable, deepest = [], 0
    for entry, (ids, mask) in zip(store.entries, store.masks(params.max_seq_len), strict=True):
        if not 0 <= int(ids.min()) <= int(ids.max()) < store.meta.vocab_size:
            raise BadData(
                f"{params.data_dir}, row {entry.row}: token_ids from {int(ids.min())} to {int(ids.max())}, the "
                f"verifier has {store.meta.vocab_size} tokens; extract again"
            )
        rows = counted_rows(mask, params.ttt_steps).any(dim=1)
        usable.append(bool(rows[0]))
        deepest = max(deepest, int(rows.sum()))
    if dropped := usable.count(False):
        context.warn(
            "rows_without_answer",
            f"{dropped} of {len(store)} rows have nothing to train within max_seq_len {params.max_seq_len}",
        )
    if 0 < deepest < params.ttt_steps:
        context.warn(
            "ttt_steps_without_rows",
            f"no answer is long enough for more than {deepest} of the {params.ttt_steps} ttt_steps: nothing is learned "
            "in the others",
        )
    train, val = split_by_prompt([entry.prompt for entry in store.entries], params.val_ratio, params.seed)
    train, val = [row for row in train if usable[row]], [row for row in val if usable[row]]
    if not train:
        raise BadData(
            f"{params.data_dir}: no row is left to train on: of {len(store)} rows {dropped} have no answer within "
            f"max_seq_len {params.max_seq_len}, the others are held out (val_ratio {params.val_ratio})"
        )
    if params.val_ratio and not val:
        context.warn("no_validation", "the data holds a single prompt, or none held out has an answer: no validation")
    return train, val


def _count_outside(
    context: StageContext, params: TrainParams, store: HiddenStateStore, rows: list[int], outside: Outside
) -> None:
    """Say how often the verifier chooses a token the drafter cannot propose; refuse to skip all there is."""
    found, seen = count_outside(store, rows, params.max_seq_len, outside)
    told = f"the verifier's first choice is outside the draft vocabulary for {found:,} of {seen:,} rows looked at"
    skipped = params.outside_vocab == "skip"
    if skipped and found == seen:
        raise BadData(
            f"{params.data_dir}: {told}, and outside_vocab skip leaves them out: nothing would be learned; prepare "
            "with a larger draft_vocab_size, or look whether the vocabulary map is of this data"
        )
    if skipped:
        return  # every epoch counts them
    context.report(
        "outside_vocab",
        f"{told} ({found / seen:.2%}); outside_vocab keep scores them on what it says of the tokens inside",
        outside=found,
        rows=seen,
    )


def _one_epoch(context: StageContext, training: Run) -> dict[str, Any]:
    """Train what is left of an epoch and validate; returns what the epoch event says."""
    params, trainer = training.params, training.trainer
    epoch = trainer.position.epoch
    context.phase("training")
    reporter = _StepReporter(context, training)
    train = trainer.train_epoch(reporter.on_step)
    context.check_stop()
    context.phase("validating")
    started = time.monotonic()
    val = trainer.validate(context.check_stop)
    val_s = time.monotonic() - started
    train_s = trainer.position.train_s
    event = {
        "epoch": epoch,
        "epochs": params.epochs,
        "train_s": round(train_s, 3),
        "val_s": round(val_s, 3),
        "train": train,
        "val": val,
    }
    context.events.write("epoch", **event)
    _warn_of_chance(context, training, val or train)
    print(f"epoch {epoch}: train {_brief(train)} in {train_s:.1f} s; validation {_brief(val)} in {val_s:.1f} s")
    return event


def _warn_of_chance(context: StageContext, training: Run, metrics: dict[str, Any]) -> None:
    """Say so where a drafter that guesses would do better, as one does whose learning rate was too high."""
    first, chance = metrics["loss_per_step"][0], math.log(training.trainer.drafter.config.draft_vocab_size)
    if training.params.loss == {"forward_kl": 1.0} and first is not None and first > chance:
        context.warn(
            "worse_than_chance",
            f"the loss of the first step is {first:.4g} nats, guessing gives {chance:.3g} at most: lower lr, or look "
            "at the data and at the layers it was extracted from",
        )


def _brief(metrics: dict[str, Any] | None) -> str:
    if metrics is None:
        return "none"
    accuracy = " ".join("-" if value is None else f"{value:.3f}" for value in metrics["accuracy"])
    return f"loss {metrics['loss']:.4f}, accuracy {accuracy}"


class _StepReporter:
    """Passes optimizer steps on, once a second and at the end of the epoch, with speed and remaining time; saves
    within the epoch when it is due or asked for.
    """

    def __init__(self, context: StageContext, training: Run) -> None:
        self._context, self._training = context, training
        self._params, self._total = training.params, training.trainer.total_steps
        self._epoch = training.trainer.position.epoch
        self._last_step = training.trainer.last_step(self._epoch)
        self._started = self._reported = time.monotonic()
        self._tokens = 0

    def on_step(self, report: StepReport) -> None:
        """One optimizer step was made."""
        self._tokens += report.tokens
        self._tell(report)
        self._training.keeper.poll()
        self._context.check_stop()
        if report.step != self._last_step:
            self._save_if_due(report.step)

    def _save_if_due(self, step: int) -> None:
        training, every = self._training, self._params.save_steps
        asked = self._context.checkpoint_asked()
        due = every is not None and step - training.keeper.latest_step >= every
        if due or (asked is not None and asked != training.saved_for):
            training.saved_for = asked
            training.keeper.save(f"{WITHIN_EPOCH}{step}", training.trainer)
            self._context.phase("training")

    def _tell(self, report: StepReport) -> None:
        now = time.monotonic()
        if now - self._reported < INTERVAL_S and report.step != self._last_step:
            return
        self._reported = now
        rate = self._tokens / max(now - self._started, 1e-9)
        eta = self._training.left_s(report.step)
        print(
            f"epoch {self._epoch} step {report.step}/{self._total} loss {report.loss:.4f} "
            f"lr {report.lr:.2e} grad {report.grad_norm:.2f} {rate:.0f} tokens/s, {eta:.0f} s left",
            flush=True,
        )
        self._context.events.write(
            "progress",
            step=report.step,
            steps=self._total,
            epoch=self._epoch,
            epochs=self._params.epochs,
            loss=report.loss,
            accuracy=report.accuracy,
            lr=report.lr,
            tokens_per_s=round(rate, 1),
            eta_s=round(eta, 1),
            unit="steps",
        )
