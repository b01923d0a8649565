"""Rows for which the verifier's first choice is a token the drafter cannot propose: told, and counted.

R rows, H hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from eagle3_core.contract.verifier_files import VerifierFiles
from eagle3_core.data.store import HiddenStateStore
from eagle3_core.model.vocab_map import VocabMap
from eagle3_core.training.rows import CHUNK_TARGETS
from eagle3_core.training.score import TargetHead
from eagle3_core.training.setup import make_target_head
from eagle3_core.training.ttt import counted_rows
from eagle3_core.verifier.tensors import VerifierWeights, load_rows

Outside = Callable[[Tensor], Tensor]
"""The verifier's last states [R, H] -> bool [R], true where its first choice is outside the draft vocabulary."""

ENOUGH_ROWS = 1 << 16
"""Rows that tell a share to within 0.4 percentage points, 95 times of a hundred."""


def make_outside(
    files: VerifierFiles,
    vocab_map: VocabMap,
    weights: VerifierWeights,
    inside: TargetHead,
    last_state: str,
    device: torch.device,
) -> Outside | None:
    """Tells which rows those are; None where every token is in the draft vocabulary.

    Args:
        files: the verifier, whose other head rows are read here.
        vocab_map: the draft vocabulary.
        weights: what was read of the verifier before.
        inside: the head over the draft vocabulary.
        last_state: as for `make_target_head`.
        device: where it runs.
    """
    others = (~vocab_map.t2d_V).nonzero()[:, 0]
    if not len(others):
        return None
    head = weights.embedding[others] if files.tied else load_rows(files.head, others)
    outside = make_target_head(replace(weights, head=head), last_state, device)

    def decide(states_RH: Tensor) -> Tensor:
        parts = states_RH.to(device).split(CHUNK_TARGETS)
        return torch.cat([outside(part).amax(-1) > inside(part).amax(-1) for part in parts])

    return decide


def count_outside(store: HiddenStateStore, rows: Sequence[int], max_seq_len: int, outside: Outside) -> tuple[int, int]:
    """How many rows of the first TTT step those are, and among how many; ends when it has seen enough.

    Args:
        store: hidden states.
        rows: row numbers of the store, each with a counted row.
        max_seq_len: tokens a row is cut to.
        outside: see `make_outside`.

    Raises:
        BadData: as `HiddenStateStore.read`.
    """
    found = seen = 0
    for number in rows:
        row = store.read(number, max_seq_len)
        targets = counted_rows(row.loss_mask_T, 1)[0].nonzero()[:, 0] + 1
        found += int(outside(row.last_TH[targets]).sum())
        seen += len(targets)
        if seen >= ENOUGH_ROWS:
            break
    return found, seen
