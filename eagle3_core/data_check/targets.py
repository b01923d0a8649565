"""The judge on last states beside the verifier: do its norm and head make of them the tokens that follow?

    behind the final norm?   a state that went through it has, divided by the gain, a root mean square of exactly 1
    of these tokens?         the head gives the token that follows more than it gives tokens drawn at random, and more
                             than the token beside the state or the next but one, which a shifted row would give

A few tokens a row are looked at, and the rows of the head that they need; a verifier is never loaded.
P looked-at tokens of a row, H hidden, D drawn tokens.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eagle3_core.contract.verifier_files import VerifierFiles
from eagle3_core.data_check.findings import RowFindings
from eagle3_core.training.setup import make_target_head
from eagle3_core.verifier.tensors import load_verifier_weights

LOOKED_AT = 8
"""Tokens a row."""

DRAWN = 256
CHANCE = math.log(DRAWN + 1)
"""Nats of a token among so many drawn ones, for states that have nothing to do with it."""

_ASTRAY, _SURE = 0.8, 0.4
"""Of chance: a row above the first stands out where half of all rows are below the second."""

_EXACT = 5e-3
"""bfloat16 moves a root mean square less, and those of states before a norm are spread wider."""

_EXACT_FP8 = 2**-4
"""Eight bits move no number further. So wide that a row may be there by chance, half of all rows not."""

_ENOUGH = 4
"""Tokens; of fewer a root mean square may be 1 by chance."""

CPU = torch.device("cpu")


@dataclass(frozen=True)
class _Seen:
    """One row: nats [3] of the tokens around, and whether its states are normed, where enough of them tell."""

    row: int
    file: Path
    nats: Tensor
    normed: bool | None


def looked_at(length: int) -> list[int]:
    """Tokens of a row to look at: spread evenly, the last two excepted, which two tokens do not follow."""
    count = max(0, min(LOOKED_AT, length - 2))
    return [(2 * number + 1) * (length - 2) // (2 * count) for number in range(count)]


def tokens_around(ids_T: Tensor) -> Tensor:
    """int64 [P, 3]: of each state that is looked at the token beside it, the one that follows, and the next."""
    places = torch.tensor(looked_at(len(ids_T)), dtype=torch.int64)
    return ids_T[places[:, None] + torch.arange(3)]


class TargetCheck:
    """Collects what is seen of each row.

    Args:
        findings: where findings go.
        files: the verifier.
        last_state: what the store says its last states are; None: it does not say.
        is_fp8: whether they were stored in eight bits.
    """

    def __init__(
        self, findings: RowFindings, files: VerifierFiles, last_state: str | None, is_fp8: bool = False
    ) -> None:
        self._findings, self._files, self._said = findings, files, last_state
        self._exact, self._share = (_EXACT_FP8, 0.5) if is_fp8 else (_EXACT, 0.0)
        self._drawn_D = torch.randint(0, files.vocab_size, (DRAWN,), generator=torch.Generator().manual_seed(0))
        weights = load_verifier_weights(files, self._drawn_D, with_embedding=False)
        self._gain_H = weights.norm_gain
        self._drawn_head = make_target_head(weights, last_state or "pre_norm", CPU)
        self._rows: list[_Seen] = []

    def add(self, file: Path, row: int, states_PH: Tensor, tokens_P3: Tensor) -> None:
        """Take in the last states of a few tokens of a row, and the tokens around them."""
        known = (tokens_P3 >= 0) & (tokens_P3 < self._files.vocab_size)
        if not len(tokens_P3) or not bool(known.all()) or not bool(torch.isfinite(states_PH).all()):
            return
        used = self._gain_H.abs() > 1e-6
        rms_P = (states_PH[:, used] / self._gain_H[used]).square().mean(dim=1).sqrt()
        exact = bool(((rms_P - 1).abs() < self._exact).all())
        theirs = load_verifier_weights(self._files, tokens_P3.flatten(), with_embedding=False)
        own = make_target_head(theirs, self._said or "pre_norm", CPU)(states_PH).view(len(rms_P), len(rms_P), 3)
        own_P3 = own.diagonal().T
        against_P1 = self._drawn_head(states_PH).logsumexp(dim=1, keepdim=True)
        nats = (torch.logaddexp(own_P3, against_P1) - own_P3).mean(dim=0)
        self._rows.append(_Seen(row, file, nats, exact if len(rms_P) >= _ENOUGH else None))

    def finish(self) -> None:
        """What the rows say together."""
        if not self._rows:
            return
        normed = [seen.normed for seen in self._rows if seen.normed is not None]
        wrong = normed.count(self._said == "pre_norm")
        if self._said is not None and wrong > self._share * len(normed):
            found = "behind" if self._said == "pre_norm" else "before"
            what = f"the last states of {wrong} of {len(normed)} rows are from {found} the final norm"
            self._findings.add("norm_mislabelled", f"{what}, the index says {self._said}")
        if self._said is None and 0 < normed.count(True) < len(normed):
            what = f"the last states of {normed.count(True)} of {len(normed)} rows are from behind the final norm"
            self._findings.add("norm_mixed", f"{what}, those of the others from before it")
        before, median, behind = torch.stack([seen.nats for seen in self._rows]).median(dim=0).values.tolist()
        where = " behind the final norm" if self._said is None and normed and all(normed) else ""
        self._findings.report.add(
            "measured",
            f"the last states{where} give the tokens that follow {median:.2f} nats (median of {len(self._rows)} rows) "
            f"among {DRAWN} drawn ones; states that have nothing to do with them give {CHANCE:.2f} or more",
        )
        for nats, which, when in ((before, "beside them", "late"), (behind, "behind the next", "early")):
            if nats < _SURE * CHANCE and nats < median / 2:
                what = f"the last states give the tokens {which} {nats:.2f} nats, those that follow {median:.2f}"
                self._findings.add("states_shifted", f"{what}: they lie a token too {when}")
        for seen in self._rows if median < _SURE * CHANCE else ():
            if seen.nats[1] > _ASTRAY * CHANCE:
                what = (
                    f"row {seen.row}: the tokens that follow get {seen.nats[1]:.2f} nats, half of all rows {median:.2f}"
                )
                self._findings.add("unlike_other_rows", f"{what} or less", file=seen.file)
