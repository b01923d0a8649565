"""The tensors of a drafter, loaded; and what a torch.save file holds, in memory."""

import pickle
import re
import struct
import warnings
from pathlib import Path

import torch
from torch import Tensor

from eagle3_core.checkpoint.archive import read_archive
from eagle3_core.checkpoint.weights import Entry, open_drafter_weights
from eagle3_core.errors import UnreadableFile
from eagle3_core.verifier.tensors import load_tensor

_DAMAGE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)
"""What torch.load raises on damaged bytes; found by flipping them."""


def read_drafter_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a drafter by canonical name, on the CPU, in the dtype of the file.

    Raises:
        CheckpointError: no weight file, or two names for one tensor (both are listed).
        UnreadableFile: a damaged file, or a pickle that wants to run code.
    """
    return {name: load_entry(entry) for name, entry in open_drafter_weights(path).entries.items()}


def load_entry(entry: Entry) -> Tensor:
    """One tensor of a drafter.

    Raises:
        UnreadableFile: the file ended early or its dtype is unknown to torch.
    """
    return load_tensor(entry.location) if entry.location is not None else load_view(entry).contiguous()


def load_view(entry: Entry) -> Tensor:
    """One tensor of a torch.save file, mapped from it and with the strides it was saved with."""
    content = load_pickle(entry.file)
    for key in ("state_dict", "draft_state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    assert isinstance(content, dict), "the archive was read before"
    tensor = content[entry.stored_name]
    assert isinstance(tensor, Tensor)
    return tensor.detach()


def load_pickle(path: Path) -> object:
    """The content of a torch.save file, tensors mapped from the file.

    Raises:
        UnreadableFile: damaged, or it holds more than tensors and plain containers.
    """
    read_archive(path)
    try:
        with warnings.catch_warnings():
            # What torch thinks of the protocol of a file under suspicion is no news to the user.
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise UnreadableFile(path, "damaged_pickle", f"is damaged: {_first_line(error)}") from error
    except _DAMAGE as error:
        size = path.stat().st_size
        raise UnreadableFile(path, "damaged_pickle", f"is damaged ({size:,} bytes): {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return re.split(r"\n", text)[0][:200] if text else type(error).__name__
