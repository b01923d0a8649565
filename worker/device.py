"""Which device a stage runs on."""

import torch

from eagle3_core.errors import BadInput


def pick_device(name: str) -> torch.device:
    """The device a request means; `auto` is the first GPU, else the CPU.

    Raises:
        BadInput: a GPU was asked for and there is none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise BadInput(f"device {name!r} was asked for, but torch sees no GPU")
    return torch.device(name)
