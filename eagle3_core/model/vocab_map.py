"""The draft vocabulary: which verifier tokens a drafter can propose.

d2t int64 [D] holds offsets: target = draft + d2t[draft]. t2d bool [V] is true where the token has a draft id.
Draft ids ascend with target ids. V verifier vocabulary, D draft vocabulary.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from eagle3_core.contract.headers import read_header
from eagle3_core.contract.jobdir import write_whole
from eagle3_core.errors import BadInput

FILE_NAME = "vocab_map.safetensors"


@dataclass(frozen=True)
class VocabMap:
    """d2t and t2d, agreeing with each other, and the counts they came from."""

    d2t_D: Tensor
    t2d_V: Tensor
    counts_V: Tensor

    @property
    def target_ids_D(self) -> Tensor:
        """int64 [D], ascending verifier tokens."""
        return self.d2t_D + torch.arange(len(self.d2t_D))

    @property
    def coverage(self) -> float:
        """Share of the counted tokens that have a draft id; 1.0 when nothing was counted."""
        total = int(self.counts_V.sum())
        return int(self.counts_V[self.t2d_V].sum()) / total if total else 1.0


def count_supervised(counts_V: Tensor, token_ids_T: Tensor, loss_mask_T: Tensor) -> int:
    """Add the supervised tokens to `counts_V`; returns how many they are.

    Args:
        counts_V: int64 [V]; occurrences per token so far.
        token_ids_T: integer [T], each of 0..V-1.
        loss_mask_T: bool [T].
    """
    supervised = token_ids_T[loss_mask_T]
    counts_V += torch.bincount(supervised, minlength=len(counts_V))
    return len(supervised)


def build_vocab_map(counts_V: Tensor, draft_vocab_size: int, always: Iterable[int]) -> VocabMap:
    """The most frequent tokens, ties by id, with the special ones always among them; in O(V).

    Args:
        counts_V: int64 [V]; occurrences per token, supervised positions only.
        draft_vocab_size: D, tokens; 1..V.
        always: tokens that are kept whatever their count: end of text, end of turn, think tags.

    Raises:
        BadInput: D is larger than V, or smaller than the number of tokens that are always kept, or the data holds
            the first D tokens alone: such a map could not be told from one that was never filled in.
    """
    vocab_size = len(counts_V)
    special = torch.tensor(sorted({token for token in always if 0 <= token < vocab_size}), dtype=torch.int64)
    if not len(special) <= draft_vocab_size <= vocab_size:
        raise BadInput(
            f"draft_vocab_size {draft_vocab_size} is not between the {len(special)} special tokens that are always "
            f"kept and the verifier's vocabulary of {vocab_size}"
        )
    rank = counts_V.clone()
    rank[special] = torch.iinfo(torch.int64).max
    least = rank.kthvalue(vocab_size - draft_vocab_size + 1).values
    chosen_V = rank > least
    ties = (rank == least).nonzero()[:, 0]
    chosen_V[ties[: draft_vocab_size - int(chosen_V.sum())]] = True
    vocab_map = map_of_tokens(chosen_V.nonzero()[:, 0], counts_V)
    if fault := map_fault(vocab_map.d2t_D, vocab_map.t2d_V, vocab_size):
        raise BadInput(f"draft_vocab_size {draft_vocab_size} cannot be filled from this data: {fault}")
    return vocab_map


def map_of_tokens(tokens_D: Tensor, counts_V: Tensor) -> VocabMap:
    """The map of these verifier tokens, int64 [D], distinct and ascending."""
    t2d = torch.zeros(len(counts_V), dtype=torch.bool)
    t2d[tokens_D] = True
    return VocabMap(tokens_D - torch.arange(len(tokens_D)), t2d, counts_V)


def map_fault(d2t_D: Tensor, t2d_V: Tensor | None, vocab_size: int) -> str | None:
    """What is wrong with a map in either order, or None; t2d is compared where it is given."""
    tokens_D = torch.arange(len(d2t_D)) + d2t_D

    def named(ids_D: Tensor) -> Tensor:
        named_V = torch.zeros(vocab_size, dtype=torch.bool)
        named_V[ids_D] = True
        return named_V

    def distinct(ids_D: Tensor) -> bool:
        return 0 <= int(ids_D.min()) <= int(ids_D.max()) < vocab_size and int(named(ids_D).sum()) == len(ids_D)

    def agrees(ids_D: Tensor) -> bool:
        return t2d_V is None or torch.equal(named(ids_D).nonzero()[:, 0], t2d_V.nonzero()[:, 0])

    if len(d2t_D) < vocab_size and not bool(d2t_D.any()):
        return f"d2t is all zero: draft ids stand for the tokens 0..{len(d2t_D) - 1}, an arbitrary slice"
    if distinct(tokens_D) and agrees(tokens_D):
        return None
    if distinct(d2t_D) and agrees(d2t_D):
        return "d2t looks absolute: it holds verifier tokens where offsets (token - draft id) are meant"
    if distinct(tokens_D):
        return "d2t and t2d name different tokens"
    return f"d2t does not name {len(d2t_D)} distinct tokens of 0..{vocab_size - 1}"


def save_vocab_map(directory: Path, vocab_map: VocabMap) -> Path:
    """Write vocab_map.safetensors: d2t, t2d, token_counts."""
    path = directory / FILE_NAME
    tensors = {"d2t": vocab_map.d2t_D, "t2d": vocab_map.t2d_V, "token_counts": vocab_map.counts_V}
    write_whole(path, save(tensors, metadata={"format": "pt"}))
    return path


def load_vocab_map(directory: Path) -> VocabMap:
    """Read and check vocab_map.safetensors.

    Raises:
        BadInput: the file is missing or damaged, or d2t and t2d contradict each other.
    """
    path = directory / FILE_NAME
    if not path.exists():
        raise BadInput(f"{path} is missing: vocab_map_dir is the output directory of a prepare job")
    read_header(path)
    tensors = load_file(path)
    for name, dtype in (("d2t", torch.int64), ("t2d", torch.bool), ("token_counts", torch.int64)):
        if name not in tensors or tensors[name].dtype != dtype or tensors[name].dim() != 1:
            raise BadInput(f"{path}: tensor {name} should be a one-dimensional {dtype}; run prepare again")
    vocab_map = VocabMap(tensors["d2t"], tensors["t2d"], tensors["token_counts"])
    fault = map_fault(vocab_map.d2t_D, vocab_map.t2d_V, len(vocab_map.t2d_V))
    if fault is None and not torch.equal(vocab_map.target_ids_D, vocab_map.t2d_V.nonzero()[:, 0]):
        fault = "the draft ids do not ascend with the tokens they stand for"
    if fault is None and len(vocab_map.counts_V) != len(vocab_map.t2d_V):
        fault = f"token_counts has {len(vocab_map.counts_V)} entries, t2d {len(vocab_map.t2d_V)}"
    if fault is not None:
        raise BadInput(f"{path}: {fault}; run prepare again")
    return vocab_map
