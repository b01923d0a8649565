"""Training: optimizer steps over packs of rows, an epoch of training, an epoch of validation.

It knows nothing of jobs: the caller drives the epochs, hears of each step, writes checkpoints and may stop it. Between
two steps `position` says all that a later run needs, beside weights, optimizer and schedule, to go on in the same data
order with the same noise.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from eagle3_core.contract.params import TrainParams
from eagle3_core.data.store import HiddenStateStore, StoredRow
from eagle3_core.errors import BadData, Diverged
from eagle3_core.model.drafter import Eagle3Drafter
from eagle3_core.training.engine import Document, make_pack, score_pack
from eagle3_core.training.losses import mixture
from eagle3_core.training.outside import Outside
from eagle3_core.training.packing import packs, steps
from eagle3_core.training.schedule import make_scheduler, warmup_steps
from eagle3_core.training.score import StepScore, TargetHead
from eagle3_core.training.ttt import counted_rows


@dataclass
class Totals:
    """Sums over packs, per TTT step. `skipped`: rows left out since the verifier's choice is outside the vocabulary."""

    weights: list[float]
    loss: list[float] = field(default_factory=list)
    correct: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.loss = self.loss or [0.0] * len(self.weights)
        self.correct = self.correct or [0] * len(self.weights)
        self.rows = self.rows or [0] * len(self.weights)
        self.skipped = self.skipped or [0] * len(self.weights)

    def add(self, scores: list[StepScore], skipped: list[int]) -> None:
        """Take in one pack."""
        for k, score in enumerate(scores):
            self.skipped[k] += skipped[k]
            self.loss[k] += float(score.loss_sum)
            self.correct[k] += int(score.correct)
            self.rows[k] += score.rows

    def metrics(self) -> dict[str, Any]:
        """loss (weighted sum of the step means, nats), loss_per_step, accuracy and rows per step; None without rows.
        outside_vocab per step where rows were skipped for it.
        """
        means = [loss / rows if rows else None for loss, rows in zip(self.loss, self.rows, strict=True)]
        accuracy = [ok / rows if rows else None for ok, rows in zip(self.correct, self.rows, strict=True)]
        weighted = [weight * mean for weight, mean in zip(self.weights, means, strict=True) if mean is not None]
        metrics = {"loss": sum(weighted), "loss_per_step": means, "accuracy": accuracy, "rows": self.rows}
        return metrics | ({"outside_vocab": self.skipped} if any(self.skipped) else {})


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


@dataclass(frozen=True)
class _Loaded:
    """A pack on its way.

    rows: as stored.
    kept: of each, bool [K, T - 1], the rows that count.
    skipped: how many rows of each TTT step were skipped.
    first: number of the first row in the run, which decides the noise; None: no noise.
    """

    rows: list[StoredRow]
    kept: list[Tensor]
    skipped: list[int]
    first: int | None

    def alone(self) -> Iterator["_Loaded"]:
        """Each row as a pack of its own."""
        for offset, (row, kept) in enumerate(zip(self.rows, self.kept, strict=True)):
            yield _Loaded([row], [kept], self.skipped, None if self.first is None else self.first + offset)


def _make_optimizer(drafter: Eagle3Drafter, params: TrainParams) -> torch.optim.AdamW:
    """AdamW over what is trained. The embedding does not decay: rows of tokens that the data lacks stay as they are."""
    named = [(name, p) for name, p in drafter.named_parameters() if p.requires_grad]
    embedding = [each for each in named if each[1] is drafter.embed_tokens.weight]
    groups: list[dict[str, Any]] = [{"params": [each for each in named if each not in embedding]}]
    if embedding:
        groups.append({"params": embedding, "weight_decay": 0.0})
    return torch.optim.AdamW(groups, lr=params.lr, weight_decay=params.weight_decay, fused=True)


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
        outside: Outside | None = None,
    ) -> None:
        """Set up.

        Args:
            params: the request.
            drafter: on `device`, weights in float32.
            target_head: see `score_pack`.
            store: hidden states.
            train_rows: row numbers of the store to train on; each has a counted row.
            val_rows: row numbers to validate on.
            device: where everything runs.
            outside: tells which rows to skip; None: none.
        """
        self.params, self.drafter, self.target_head, self.device = params, drafter, target_head, device
        self._outside, self._loss = outside, mixture(params.loss)
        self._weights = params.step_weights()
        self._dtype = torch.float32 if params.dtype == "float32" else torch.bfloat16
        self._train_rows, self._val_rows = train_rows, val_rows
        self._lengths = [min(entry.length, params.max_seq_len) for entry in store.entries]
        self._last_steps: list[int] = []
        for epoch in range(params.epochs):
            before = self._last_steps[-1] if self._last_steps else 0
            self._last_steps.append(before + sum(1 for _ in self._steps(self._order_of(epoch))))
        self.total_steps = self._last_steps[-1]
        self.warmup = warmup_steps(self.total_steps, params.warmup_ratio)
        drafter.lm_head.weight.requires_grad_(params.train_head)
        drafter.embed_tokens.weight.requires_grad_(params.train_embedding)
        self.optimizer = _make_optimizer(drafter, params)
        self.scheduler = make_scheduler(self.optimizer, self.total_steps, self.warmup, params.scheduler)
        self.step = 0
        self.position = Position(0, 0, self._totals())
        self._noise = torch.Generator(device=device)
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
        rows = self._order_of(here.epoch)[here.rows_done :]
        began = time.monotonic() - here.train_s
        stored = self._load(rows)
        for step in self._steps(rows):
            loaded = []
            for pack in step:
                first = here.epoch * len(self._train_rows) + here.rows_done
                loaded.append(self._next_pack(stored, len(pack), first))
                here.rows_done += len(pack)
            scores, loss, grad_norm = self._train_step(loaded)
            accuracy = [right / count if count else None for right, count in zip(*scores, strict=True)]
            lr = self.optimizer.param_groups[0]["lr"]
            self.scheduler.step()
            self.step += 1
            here.train_s = time.monotonic() - began
            tokens = sum(len(row.token_ids_T) for pack in loaded for row in pack.rows)
            on_step(StepReport(self.step, loss, accuracy, grad_norm, lr, tokens))
        return here.totals.metrics()

    def last_step(self, epoch: int) -> int:
        """The number of the last optimizer step of an epoch."""
        return self._last_steps[epoch]

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
        stored = self._load(self._val_rows)
        for pack in packs(self._val_rows, self._lengths, self._batch_tokens()):
            loaded = self._next_pack(stored, len(pack), None)
            totals.add(self._score(loaded, self._weights)[1], loaded.skipped)
            for _ in pack:
                on_row()
        return totals.metrics()

    def trained_parameters(self) -> int:
        """How many numbers the optimizer changes."""
        return sum(p.numel() for group in self.optimizer.param_groups for p in group["params"])

    def _totals(self) -> Totals:
        return Totals(list(self._weights))

    def _order_of(self, epoch: int) -> list[int]:
        """The training rows in the order of an epoch."""
        order = torch.Generator().manual_seed(self.params.seed + epoch)
        return [self._train_rows[place] for place in torch.randperm(len(self._train_rows), generator=order).tolist()]

    def _batch_tokens(self) -> int:
        return self.params.batch_tokens or self.params.max_seq_len

    def _steps(self, rows: list[int]) -> Iterator[list[list[int]]]:
        return steps(rows, self._lengths, self._batch_tokens(), self.params.accumulate_packs)

    def _load(self, rows: list[int]) -> Iterator[StoredRow]:
        self._order.rows = rows
        for row in self._loader:
            if isinstance(row, BadData):
                raise row
            yield row

    def _next_pack(self, stored: Iterator[StoredRow], count: int, first: int | None) -> _Loaded:
        """The next rows, and which of theirs count."""
        rows, kept = [next(stored) for _ in range(count)], []
        skipped = torch.zeros(self.params.ttt_steps, dtype=torch.int64)
        for row in rows:
            counted = counted_rows(row.loss_mask_T, self.params.ttt_steps)
            kept.append(counted if self._outside is None else counted & ~self._outside_rows(row, counted))
            skipped += counted.sum(1) - kept[-1].sum(1)
        return _Loaded(rows, kept, skipped.tolist(), first)

    def _document(self, row: StoredRow, kept_KR: Tensor, number: int | None) -> Document:
        """A stored row with its noise."""
        aux = row.aux_TAH.to(self.device, torch.float32)
        if number is not None and self.params.noise:
            # Seeded by the row's number in the run: neither a resumed run nor other packs change a row's noise.
            self._noise.manual_seed((self.params.seed * 1_000_003 + number) % (1 << 64))
            noise = torch.rand(aux.shape, generator=self._noise, device=self.device)
            aux = aux + (noise * 2 - 1) * self.params.noise
        return Document(row.token_ids_T, aux, row.last_TH, kept_KR)

    def _outside_rows(self, row: StoredRow, counted_KR: Tensor) -> Tensor:
        """bool [K, R], rows whose target's first choice is outside the draft vocabulary."""
        assert self._outside is not None
        steps, count = counted_KR.shape
        needed = torch.zeros(count + steps + 1, dtype=torch.bool)
        for k, counted in enumerate(counted_KR):
            needed[1 + k : 1 + k + count] |= counted
        outside = torch.zeros_like(needed)
        places = needed.nonzero()[:, 0]
        outside[places] = self._outside(row.last_TH[places]).cpu()
        return torch.stack([outside[1 + k : 1 + k + count] for k in range(steps)])

    def _score(self, loaded: _Loaded, weights: Sequence[float]) -> tuple[Tensor, list[StepScore]]:
        numbers = [None if loaded.first is None else loaded.first + place for place in range(len(loaded.rows))]
        documents = [self._document(*each) for each in zip(loaded.rows, loaded.kept, numbers, strict=True)]
        pack = make_pack(documents, self.drafter.config, self.device)
        return score_pack(self.drafter, self.target_head, pack, weights, self._loss, self._dtype)

    def _train_step(self, loaded: list[_Loaded]) -> tuple[tuple[list[int], list[int]], float, float]:
        """One optimizer step: (correct, rows) of each TTT step, the loss, and the gradient's norm."""
        counts = torch.stack([kept.sum(1) for pack in loaded for kept in pack.kept]).sum(0).tolist()
        weights = [weight / max(1, count) for weight, count in zip(self._weights, counts, strict=True)]
        correct, loss = [0] * len(counts), 0.0
        for pack in loaded:
            part, scores = self._score(pack, weights)
            if not torch.isfinite(part):
                self._diverged(f"the loss is {part.item()}", loaded)
            if any(score.rows for score in scores):
                part.backward()
            loss += part.item()
            correct = [sum_ + int(score.correct) for sum_, score in zip(correct, scores, strict=True)]
            self.position.totals.add(scores, pack.skipped)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.params.grad_clip))
        if not norm < float("inf"):
            self._diverged(f"the gradient's norm is {norm}", loaded)
        self.optimizer.step()
        # At once: the next step's activations take the place of the gradients.
        self.optimizer.zero_grad(set_to_none=True)
        return (correct, counts), loss, norm

    def _diverged(self, what: str, loaded: list[_Loaded]) -> None:
        """Raise Diverged, naming the rows whose own loss is not finite, or else all of the step."""
        rows = [row for pack in loaded for row in pack.alone()]
        with torch.no_grad():
            culprits = [row for row in rows if not torch.isfinite(self._score(row, self._weights)[0])]
        names = [row.rows[0].where for row in culprits or rows]
        listed = "; ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise Diverged(f"{what} at step {self.step + 1}, on {listed}; lower lr or grad_clip, or check the data there")
