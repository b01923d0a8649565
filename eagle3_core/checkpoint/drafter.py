"""A checkpoint as a drafter that can be run."""

from pathlib import Path

import torch

from eagle3_core.checkpoint.tensors import read_drafter_tensors
from eagle3_core.contract.drafter_files import read_drafter_config
from eagle3_core.contract.verifier_files import VerifierFiles
from eagle3_core.errors import BadInput
from eagle3_core.model.drafter import Eagle3Drafter
from eagle3_core.verifier.tensors import load_tensor


def load_drafter(path: Path, files: VerifierFiles, device: torch.device) -> Eagle3Drafter:
    """The drafter in float32, ready to be evaluated.

    Args:
        path: checkpoint directory.
        files: the verifier, for checkpoints that bring no embedding.
        device: where it goes.

    Raises:
        CheckpointError: it cannot be read, or has parts that are not computed here.
        BadInput: tensors and config disagree.
    """
    tensors = read_drafter_tensors(path)
    if "embed_tokens.weight" not in tensors:
        tensors["embed_tokens.weight"] = load_tensor(files.embedding)[: files.vocab_size]
    drafter = Eagle3Drafter(read_drafter_config(path).config)
    if "d2t" in tensors and "t2d" not in tensors:
        tensors["t2d"] = torch.zeros(drafter.config.vocab_size, dtype=torch.bool)
        tensors["t2d"][tensors["d2t"] + torch.arange(len(tensors["d2t"]))] = True
    try:
        drafter.load_state_dict(tensors)
    except RuntimeError as error:
        raise BadInput(f"{path}: tensors and config.json disagree: {error}") from error
    return drafter.to(device).eval()
