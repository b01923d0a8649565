"""Which device a stage runs on: one of the GPUs the job was given, which are the only ones it sees."""

import os

import torch

from eagle3_core.errors import BadInput


def pick_device(name: str) -> torch.device:
    """The device a request means; `auto` is the first GPU, else the CPU.

    `cuda:3` of a job that asked for nothing else is the host's GPU 3, which the daemon then gave it: the only one here.

    Raises:
        BadInput: a GPU was asked for and there is none, or none of that number.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise BadInput(f"device {name!r} was asked for, but torch sees no GPU")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if torch.cuda.device_count() == 1 and given.startswith(("GPU-", "MIG-")):
            return torch.device("cuda:0")
        raise BadInput(f"device {name!r} was asked for, but torch sees {torch.cuda.device_count()} GPUs")
    return device
