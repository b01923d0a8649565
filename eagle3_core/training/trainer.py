"""The training engine: one sequence a step, an epoch of training, an epoch of validation.

It knows nothing of jobs: the caller drives the epochs, hears of each step, writes checkpoints and may stop it. Between
two steps `position` says all that a later run needs, beside weights, optimizer and schedule, to go on in the same data
order with the same noise.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from eagle3_core.contract.params import TrainParams
from eagle3_core.data.store import HiddenStateStore, StoredRow
from eagle3_core.errors import BadData, Diverged
from eagle3_core.model.drafter import Eagle3Drafter
from eagle3_core.training.schedule import make_scheduler, warmup_steps
from eagle3_core.training.ttt import StepScore, TargetHead, counted_rows, score_sequence, total_loss


@dataclass
class Totals:
    """Sums over sequences, per TTT step."""

    ttt_steps: int
    decay: float
    loss: list[float] = field(default_factory=list)
    correct: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.loss = self.loss or [0.0] * self.ttt_steps
        self.correct = self.correct or [0] * self.ttt_steps
        self.rows = self.rows or [0] * self.ttt_steps

    def add(self, scores: list[StepScore]) -> None:
        """Take in one sequence."""
        for k, score in enumerate(scores):
            self.loss[k] += float(score.loss_sum.detach())
            self.correct[k] += int(score.correct)
            self.rows[k] += score.rows

    def metrics(self) -> dict[str, Any]:
        """loss (decayed sum of the step means, nats), loss_per_step, accuracy and rows per step; None without rows."""
        means = [loss / rows if rows else None for loss, rows in zip(self.loss, self.rows, strict=True)]
        accuracy = [ok / rows if rows else None for ok, rows in zip(self.correct, self.rows, strict=True)]
        return {
            "loss": sum(self.decay**k * mean for k, mean in enumerate(means) if mean is not None),
            "loss_per_step": means,
            "accuracy": accuracy,
            "rows": self.rows,
        }


@dataclass
class Position:
    """Where a run is: `rows_done` rows of `epoch` are trained, their sums are in `totals`."""

    epoch: int
    rows_done: int
    totals: Totals
    train_s: float = 0.0


@dataclass(frozen=True)
class StepReport:
    """One optimizer step, for whoever watches."""

    step: int
    loss: float
    accuracy: list[float | None]
    grad_norm: float
    lr: float
    tokens: int


class _Rows(Dataset["StoredRow | BadData"]):
    """Rows of a store by number; picklable, so that reader processes can open it for themselves."""

    def __init__(self, store: HiddenStateStore, max_seq_len: int) -> None:
        self.store, self.max_seq_len = store, max_seq_len

    def __getitem__(self, row: int) -> StoredRow | BadData:
        # Handed over, since a reader process would raise it with its own traceback in the message.
        try:
            return self.store.read(row, self.max_seq_len)
        except BadData as error:
            return error


class _Order(Sampler[int]):
    """The rows of the pass to come; set before each."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows)


class Trainer:
    """Drafter, data, optimizer and schedule of one run."""

    def __init__(
        self,
        params: TrainParams,
        drafter: Eagle3Drafter,
        target_head: TargetHead,
        store: HiddenStateStore,
        train_rows: list[int],
        val_rows: list[int],
        device: torch.device,
    ) -> None:
        """Set up.

        Args:
            params: the request.
            drafter: on `device`, weights in float32.
            target_head: see `score_sequence`.
            store: hidden states.
            train_rows: row numbers of the store to train on; each has a counted row.
            val_rows: row numbers to validate on.
            device: where everything runs.
        """
        self.params, self.drafter, self.target_head, self.device = params, drafter, target_head, device
        self.total_steps = params.epochs * len(train_rows)
        self.warmup = warmup_steps(self.total_steps, params.warmup_ratio)
        drafter.lm_head.weight.requires_grad_(params.train_head)
        named = [(name, p) for name, p in drafter.named_parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(named, lr=params.lr, weight_decay=params.weight_decay, fused=True)
        self.scheduler = make_scheduler(self.optimizer, self.total_steps, self.warmup, params.scheduler)
        self.step = 0
        self.position = Position(0, 0, self._totals())
        self._noise = torch.Generator(device=device)
        self._train_rows, self._val_rows = train_rows, val_rows
        self._order = _Order()
        # One set of readers for all passes. spawn: a forked child would hold the attempt's lock.
        self._loader = DataLoader(
            _Rows(store, params.max_seq_len),
            batch_size=None,
            sampler=self._order,
            num_workers=params.num_workers,
            multiprocessing_context="spawn" if params.num_workers else None,
            persistent_workers=params.num_workers > 0,
        )

    def train_epoch(self, on_step: Callable[[StepReport], None]) -> dict[str, Any]:
        """What is left of the position's epoch; returns the metrics of `Totals` over the whole of it.

        Raises:
            Diverged: a loss or gradient is not finite; names step and data.
        """
        self.drafter.train()
        here = self.position
        order = torch.Generator().manual_seed(self.params.seed + here.epoch)
        places = torch.randperm(len(self._train_rows), generator=order).tolist()[here.rows_done :]
        began = time.monotonic() - here.train_s
        for row in self._load([self._train_rows[place] for place in places]):
            # Seeded anew, so that a resumed run draws the same noise.
            self._noise.manual_seed(self.params.seed * 1_000_003 + self.step)
            scores = self._score(row, self.params.noise)
            loss = total_loss(scores, self.params.ttt_step_loss_decay)
            grad_norm = self._optimize(loss, row)
            accuracy = [int(score.correct) / score.rows if score.rows else None for score in scores]
            lr = self.optimizer.param_groups[0]["lr"]
            self.scheduler.step()
            self.step += 1
            here.totals.add(scores)
            here.rows_done += 1
            here.train_s = time.monotonic() - began
            on_step(StepReport(self.step, float(loss.detach()), accuracy, grad_norm, lr, len(row.token_ids_T)))
        return here.totals.metrics()

    def next_epoch(self) -> None:
        """Move the position to the start of the next epoch."""
        self.position = Position(self.position.epoch + 1, 0, self._totals())

    @torch.no_grad()
    def validate(self, on_row: Callable[[], None]) -> dict[str, Any] | None:
        """Metrics over the held-out rows, without noise; None when there are none."""
        if not self._val_rows:
            return None
        self.drafter.eval()
        totals = self._totals()
        for row in self._load(self._val_rows):
            totals.add(self._score(row, 0.0))
            on_row()
        return totals.metrics()

    def trained_parameters(self) -> int:
        """How many numbers the optimizer changes."""
        return sum(p.numel() for group in self.optimizer.param_groups for p in group["params"])

    def _totals(self) -> Totals:
        return Totals(self.params.ttt_steps, self.params.ttt_step_loss_decay)

    def _load(self, rows: list[int]) -> Iterator[StoredRow]:
        self._order.rows = rows
        for row in self._loader:
            if isinstance(row, BadData):
                raise row
            yield row

    def _score(self, row: StoredRow, noise: float) -> list[StepScore]:
        mask = row.loss_mask_T.to(self.device)
        aux = row.aux_TAH.to(self.device, torch.float32)
        if noise:
            aux = aux + (torch.rand(aux.shape, generator=self._noise, device=self.device) * 2 - 1) * noise
        with self._autocast():
            return score_sequence(
                self.drafter,
                self.target_head,
                row.token_ids_T.to(self.device),
                aux,
                row.last_TH.to(self.device, torch.float32),
                counted_rows(mask, self.params.ttt_steps),
            )

    def _autocast(self) -> AbstractContextManager[object]:
        if self.params.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def _optimize(self, loss: Tensor, row: StoredRow) -> float:
        where = f"at step {self.step + 1}, on {row.where}"
        if not torch.isfinite(loss):
            raise Diverged(f"the loss is {float(loss.detach())} {where}; lower lr or grad_clip, or check that row")
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.params.grad_clip))
        if not norm < float("inf"):
            raise Diverged(f"the gradient's norm is {norm} {where}; lower lr, or check that row")
        self.optimizer.step()
        return norm
