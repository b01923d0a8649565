"""What tests of conversion share: drafters of any make, and whether two checkpoints mean the same."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from eagle3_core.checkpoint.compare import compare
from eagle3_core.checkpoint.format import read_drafter_tensors
from eagle3_core.contract.drafter_config import DrafterConfig
from tests.judging import WEIGHTS
from tests.makers import DRAFTER, write_drafter


def drafter(parent: Path, **changes: Any) -> Path:
    """A checkpoint as training writes it, of a drafter of another make."""
    config = DrafterConfig.model_validate(DRAFTER.model_dump() | changes)
    return write_drafter(parent / "source", config=config)


def weights(path: Path) -> dict[str, torch.Tensor]:
    """Tensors by the names in the file."""
    return load_file(path / WEIGHTS)


def same(one: Path, other: Path, **options: Any) -> None:
    """Both mean the same, says the comparison; and the tensors are equal bit for bit, says torch."""
    found = compare(one, other, **options)
    assert found.equal, found.to_dict()
    ours, theirs = read_drafter_tensors(one), read_drafter_tensors(other)
    for name in (ours.keys() & theirs.keys()) - {"lm_head.weight", "d2t", "t2d"}:
        assert ours[name].dtype == theirs[name].dtype
        assert torch.equal(ours[name], theirs[name]), name
    assert torch.equal(head_by_token(ours), head_by_token(theirs))


def head_by_token(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Rows of the head, put where the token they stand for is."""
    head = tensors["lm_head.weight"]
    tokens = torch.arange(len(head)) + tensors.get("d2t", torch.zeros(len(head), dtype=torch.int64))
    out = torch.zeros(int(tokens.max()) + 1, head.shape[1], dtype=head.dtype)
    out[tokens] = head
    return out
