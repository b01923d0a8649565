"""Stored states computed once more, in another way, and compared: each row alone, by transformers' own account."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from eagle3_core.contract.store_files import StoreMeta
from eagle3_core.contract.tensor_names import FINAL_NORM
from eagle3_core.data.conversations import TokenRow
from eagle3_core.data.store import DTYPES, HiddenStateStore, StoredRow
from eagle3_core.errors import BadData
from worker.hugging_face import backbone, part_of
from worker.states import StateReader

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05, "float8_e4m3": 0.08}
"""By the coarser of the dtypes of forward pass and store: mean over tokens of the difference's norm over the norm. Rows
of a batch and rows alone are computed by other kernels; states of the next layer or of another text are off by more."""

_Pair = tuple[int, Tensor, Tensor]
"""Layer, our states [T, H] and theirs."""

COMPARED_TOKENS = 1024
"""Of a row, from its start: what follows changes nothing there, and the states of all layers have to fit somewhere."""


@dataclass(frozen=True)
class Agreement:
    """What came of a comparison: rows compared, the largest difference found, what was allowed, and how it was done."""

    rows: int
    worst: float
    tolerance: float
    way: str


class Recomputation:
    """Computes stored rows once more."""

    def __init__(self, model: nn.Module, reader: StateReader, meta: StoreMeta, dtype: str) -> None:
        """Set up.

        Args:
            model: the verifier.
            reader: of that verifier.
            meta: of the store.
            dtype: of the verifier's forward pass.
        """
        self._model, self._reader, self._meta, self._dtype = model, reader, meta, DTYPES[dtype]
        norm = part_of(backbone(model), FINAL_NORM)
        assert norm is not None, "the backbone is what has one"
        self._norm = norm
        self._tolerance = max(TOLERANCE[dtype], TOLERANCE[meta.dtype])

    @torch.inference_mode()
    def compare(self, store: HiddenStateStore, numbers: Sequence[int]) -> Agreement:
        """Compare rows of a store with what the verifier gives for each of them alone.

        Args:
            store: the states, as they lie on disk.
            numbers: of the rows in the store.

        Raises:
            BadData: they differ by more than is allowed; names row, layer and how far.
        """
        worst, ways = 0.0, set()
        for number in numbers:
            row = store.read(number, COMPARED_TOKENS)
            pairs = self._by_transformers(row)
            ways.add("row alone" if pairs is None else "row alone, output_hidden_states")
            for layer, ours, theirs in pairs or self._by_reader(row):
                off = _difference(ours, theirs)
                worst = max(worst, off)
                if not off <= self._tolerance:
                    raise BadData(
                        f"{row.where}: the states of layer {layer} are {off:.2%} off what the verifier gives for this "
                        f"row alone, {self._tolerance:.2%} are allowed: they are those of another layer or text, or "
                        "the verifier computes rows of a batch in another way, which batch_tokens 1 would show"
                    )
        return Agreement(len(numbers), worst, self._tolerance, "; ".join(sorted(ways)))

    def _by_transformers(self, row: StoredRow) -> list[_Pair] | None:
        """Beside the model's own list of hidden states, whose last entry is behind the final norm; None: no list."""
        ids = row.token_ids_T[None].to(self._reader.device)
        output = self._model(input_ids=ids, use_cache=False, output_hidden_states=True, logits_to_keep=1)
        hidden, last = getattr(output, "hidden_states", None), self._meta.last_layer_id
        if hidden is None or len(hidden) != last + 1:
            return None
        normed = self._norm(row.last_TH.to(self._reader.device, self._dtype))
        aux = [(layer, row.aux_TAH[:, slot], hidden[layer][0]) for slot, layer in enumerate(self._meta.layer_ids)]
        return [
            *((k, normed if k == last else ours, theirs) for k, ours, theirs in aux),
            (last, normed, hidden[last][0]),
        ]

    def _by_reader(self, row: StoredRow) -> list[_Pair]:
        """Beside what is captured when the row runs alone."""
        ours = torch.cat((row.aux_TAH, row.last_TH[:, None]), dim=1)
        place = partial(torch.empty, ours.shape, dtype=self._dtype, device=self._reader.device)
        theirs = self._reader.read([TokenRow(row.token_ids_T, row.loss_mask_T, "")], [0], place)
        layers = (*self._meta.layer_ids, self._meta.last_layer_id)
        return [(layer, ours[:, slot], theirs[:, slot]) for slot, layer in enumerate(layers)]


def _difference(our_states: Tensor, their_states: Tensor) -> float:
    """Mean over tokens of |ours - theirs| / |theirs|: a few tokens have states a thousand times as large as others."""
    ours, theirs = our_states.cpu().float(), their_states.cpu().float()
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-12)).mean())
