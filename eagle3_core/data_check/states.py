"""One look at hidden states as their bytes go by: finite, filled, each token and each slot its own.

Nothing is held but a piece of a few MB. T tokens of a piece, S slots (aux states, then the last one), H hidden.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

_WORD = 8


@dataclass(frozen=True)
class Slot:
    """One of the states of a token: what findings call it, and the layer it enters."""

    name: str
    layer: int


@dataclass
class RowFaults:
    """What was seen in the states of one row; lists are by slot.

    zero: tokens whose state is all zero; `first_zero` the first of them.
    alike: tokens whose state equals that of the slot before.
    repeats: tokens whose states all equal those of the token before.
    """

    nan: list[int]
    inf: list[int]
    zero: list[int]
    first_zero: list[int]
    alike: list[int]
    repeats: list[int] = field(default_factory=list)
    tokens: int = 0


class StateScan:
    """Looks at the states of one row, piece by piece.

    Args:
        slots: S.
        dtype: of the stored states.
    """

    def __init__(self, slots: int, dtype: torch.dtype) -> None:
        nan, inf, zero, alike = ([0] * slots for _ in range(4))
        self.faults = RowFaults(nan, inf, zero, first_zero=[-1] * slots, alike=alike)
        self._dtype = dtype
        self._before: Tensor | None = None

    def update(self, states_TSH: Tensor) -> None:
        """Take in the states of the next tokens."""
        faults, slots = self.faults, states_TSH.shape[1]
        values = states_TSH.to(torch.bfloat16) if states_TSH.element_size() == 1 else states_TSH
        low, high = torch.aminmax(values)
        # aminmax passes NaN on, so two numbers tell whether the slow counts are needed.
        if not (torch.isfinite(low) and torch.isfinite(high)):
            for slot in range(slots):
                faults.nan[slot] += int(values[:, slot].isnan().sum())
                faults.inf[slot] += int(values[:, slot].isinf().sum())
        tokens, of_slot = (values[:, :, 0] == 0).nonzero(as_tuple=True)
        zero = ~values[tokens, of_slot].any(dim=1)
        for slot in set(of_slot[zero].tolist()):
            places = tokens[zero & (of_slot == slot)]
            if not faults.zero[slot]:
                faults.first_zero[slot] = faults.tokens + int(places[0])
            faults.zero[slot] += len(places)
        if states_TSH.shape[2] * states_TSH.element_size() % _WORD == 0:
            self._compare(states_TSH)
        faults.tokens += len(states_TSH)

    def _compare(self, states_TSH: Tensor) -> None:
        """States that are those of the token or the slot before, by their first and middle words."""
        words = states_TSH.contiguous().view(torch.int64)
        keys = torch.stack((words[:, :, 0], words[:, :, words.shape[2] // 2]), dim=2)
        filled = (keys != 0).any(dim=2)
        alike = (keys[:, 1:] == keys[:, :-1]).all(dim=2) & filled[:, 1:]
        for slot, count in enumerate(alike.sum(dim=0).tolist(), 1):
            self.faults.alike[slot] += count
        ahead = keys[:1].new_zeros(keys[:1].shape) if self._before is None else self._before
        chain = torch.cat((ahead, keys))
        again = (chain[1:] == chain[:-1]).all(dim=2).all(dim=1) & filled.all(dim=1)
        self.faults.repeats.extend((again.nonzero()[:, 0] + self.faults.tokens).tolist())
        self._before = keys[-1:].clone()
