"""Rotary position embedding: inverse frequencies of each kind, and the rotation.

T rows, n heads, hd head width.
"""

import math
from typing import Any

import torch
from torch import Tensor

from eagle3_core.errors import BadInput


def inverse_frequencies(rope: dict[str, Any], head_dim: int) -> Tensor:
    """Angular step of each pair of channels.

    Args:
        rope: {"rope_type": "default" | "linear" | "llama3", "rope_theta": base, scaling fields ...}.
        head_dim: width of one head, even.

    Returns:
        float32 [hd / 2], radians per position.

    Raises:
        BadInput: a rope type this drafter does not compute.

    Source: Su et al. 2021; the llama3 scaling of Llama 3.1.
    """
    kind = rope.get("rope_type", "default")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base = 1.0 / float(rope["rope_theta"]) ** exponents
    if kind == "default":
        return base
    if kind == "linear":
        return base / float(rope["factor"])
    if kind == "llama3":
        return _llama3(base, rope)
    raise BadInput(
        f"rope_type {kind!r} cannot be trained: a drafter computes default, linear and llama3; "
        "start from a drafter that has one of these (finetune_from)"
    )


def _llama3(base: Tensor, rope: dict[str, Any]) -> Tensor:
    """Long waves are divided by the factor, short ones kept, the ones between blended."""
    factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    wavelengths_per_context = float(rope["original_max_position_embeddings"]) * base / (2 * math.pi)
    kept = ((wavelengths_per_context - low) / (high - low)).clamp(0, 1)
    return base * (kept + (1 - kept) / factor)


def rotation(inverse_frequencies_: Tensor, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position: two [T, 1, hd / 2] of `dtype`; positions_T is int64 [T]."""
    angles = positions_T[:, None].float() * inverse_frequencies_[None, :]
    return angles.cos()[:, None].to(dtype), angles.sin()[:, None].to(dtype)


def rotate(x_TnD: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Turn channel i against channel i + hd/2, as Llama does; [T, n, hd] in and out."""
    cos, sin = cos_sin
    first, second = x_TnD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
