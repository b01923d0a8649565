"""Hidden states of batches of rows, taken from a verifier's layers while it runs; it stops behind the last one.

N tokens of a batch without its padding, L slots (aux states and the last one), H hidden.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial

import torch
from torch import Tensor, nn

from eagle3_core.contract.tensor_names import EMBEDDING, FINAL_NORM
from eagle3_core.data.conversations import TokenRow
from eagle3_core.data.store import check_tokens
from eagle3_core.errors import BadData, BadInput
from worker.hugging_face import LAYERS, backbone, entering, part_of


class _Enough(Exception):
    """All states are taken: final norm and head need not run."""


class StateReader:
    """Runs batches and puts their states where they are wanted."""

    def __init__(self, model: nn.Module, layer_ids: Sequence[int], device: torch.device) -> None:
        """Find the layers.

        Args:
            model: what `load_model` gave.
            layer_ids: id k is the stream entering layer k, the last id that behind the last layer, before the norm.
            device: where token ids are expected.

        Raises:
            BadInput: there is no decoder that can be hooked into.
        """
        self._model, self._layer_ids, self.device = model, tuple(layer_ids), device
        decoder = backbone(model)
        layers, norm, embedding = (part_of(decoder, role) for role in (LAYERS, FINAL_NORM, EMBEDDING))
        assert isinstance(layers, nn.ModuleList) and norm is not None and embedding is not None
        assert layer_ids[-1] == len(layers)
        self._embedding = embedding
        self._modules = [(slot, norm if k == len(layers) else layers[k]) for slot, k in enumerate(layer_ids)]
        self._place: Callable[[], Tensor]
        self._out: Tensor | None
        self._kept: Tensor | None
        self._columns: int
        self._passed: list[int]
        self._ids_seen: list[Tensor]

    @torch.inference_mode()
    def read(self, rows: Sequence[TokenRow], numbers: Sequence[int], place: Callable[[], Tensor]) -> Tensor:
        """One forward pass over rows padded on the right.

        No mask is given: causal attention keeps what lies behind a row's end out of it, and without one the fastest
        kernels can be used.

        Args:
            rows: the batch.
            numbers: of the rows in the prepared data, for messages.
            place: where the states go, float [N, L, H] on any device; asked for when the first ones are there.

        Returns:
            What `place` gave, filled with the states of all rows one behind the other.

        Raises:
            BadData: the verifier embedded other tokens than it was given, or gave more or fewer states.
            BadInput: it did not run its layers once each, in order.
        """
        lengths = [len(row.token_ids_T) for row in rows]
        width = max(lengths)
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        for slot, row in enumerate(rows):
            ids[slot, : lengths[slot]] = row.token_ids_T
        kept = (torch.arange(width) < torch.tensor(lengths)[:, None]).flatten()
        self._kept = None if bool(kept.all()) else kept.nonzero()[:, 0].to(self.device)
        self._place, self._out, self._columns = place, None, ids.numel()
        self._passed, self._ids_seen = [], []
        with ExitStack() as hooks, suppress(_Enough):
            hooks.callback(self._embedding.register_forward_pre_hook(self._take_ids, with_kwargs=True).remove)
            for slot, module in self._modules:
                take = partial(self._take, slot)
                hooks.callback(module.register_forward_pre_hook(take, with_kwargs=True).remove)
            self._model(input_ids=ids.to(self.device), use_cache=False)
        if self._passed != list(range(len(self._layer_ids))):
            came = [self._layer_ids[slot] for slot in self._passed]
            raise BadInput(
                f"{type(self._model).__name__} gave the states entering layers {came}, wanted once each and in order "
                f"are {list(self._layer_ids)}: its layers do not follow each other as those of a decoder do"
            )
        self._check_ids(rows, numbers, ids)
        assert self._out is not None
        return self._out

    def _take_ids(self, _module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        value = args[0] if args else next(iter(kwargs.values()))
        assert isinstance(value, Tensor)
        self._ids_seen.append(value)

    def _take(self, slot: int, _module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        states = entering(self._layer_ids[slot], args, kwargs).flatten(0, 1)
        if self._out is None:
            self._out = self._place()
        if states.shape != (self._columns, self._out.shape[-1]):
            raise BadData(
                f"{type(self._model).__name__} gave {len(states)} states of size {states.shape[-1]} entering layer "
                f"{self._layer_ids[slot]}, expected {self._columns} of size {self._out.shape[-1]}"
            )
        if self._kept is not None:
            states = states.index_select(0, self._kept.to(states.device))
        self._out[:, slot].copy_(states)
        self._passed.append(slot)
        if slot == len(self._layer_ids) - 1:
            raise _Enough

    def _check_ids(self, rows: Sequence[TokenRow], numbers: Sequence[int], ids: Tensor) -> None:
        if len(self._ids_seen) != 1 or self._ids_seen[0].numel() != ids.numel():
            shapes = [list(seen.shape) for seen in self._ids_seen]
            raise BadInput(
                f"{type(self._model).__name__} embedded token ids of the shapes {shapes}, it was given "
                f"{list(ids.shape)}: its states cannot be told apart by row"
            )
        seen = self._ids_seen[0].reshape(ids.shape).cpu()
        if not torch.equal(seen, ids):
            for slot, (row, number) in enumerate(zip(rows, numbers, strict=True)):
                check_tokens(row.token_ids_T, seen[slot, : len(row.token_ids_T)], f"row {number}")
