"""Rotary position embedding: inverse frequencies of each kind, and the rotation.

T rows, n heads, hd head width.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from eagle3_core.errors import BadInput


def inverse_frequencies(rope: dict[str, Any], head_dim: int) -> Tensor:
    """Angular step of each pair of channels.

    Args:
        rope: {"rope_type", "rope_theta": base, scaling fields ...}, as `contract.rope` writes it.
        head_dim: width of one head, even.

    Returns:
        float32 [hd / 2], radians per position. Of `dynamic` and `longrope` the form for texts within the context the
        model was first trained on; rows beyond it are refused (`longest_text`).

    Raises:
        BadInput: a rope type this drafter does not compute, a scaling field that is missing, or an odd width.

    Source: Su et al. 2021; Peng et al. 2023 (yarn); Ding et al. 2024 (longrope); the llama3 scaling of Llama 3.1.
    """
    if head_dim % 2:
        raise BadInput(f"head_dim {head_dim} is odd, and channels are rotated in pairs")
    with _every_field_there(rope):
        return _frequencies(rope, head_dim)


@contextmanager
def _every_field_there(rope: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except KeyError as error:
        raise BadInput(f"rope {rope!r:.200}: {error.args[0]} is missing") from None


def _frequencies(rope: dict[str, Any], head_dim: int) -> Tensor:
    kind = rope.get("rope_type", "default")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base = 1.0 / float(rope["rope_theta"]) ** exponents
    if kind in ("default", "dynamic"):
        return base
    if kind == "linear":
        return base / float(rope["factor"])
    if kind == "llama3":
        return _llama3(base, rope)
    if kind == "yarn":
        return _yarn(base, rope)
    if kind == "longrope":
        factors = torch.tensor(rope["short_factor"], dtype=torch.float32)
        if factors.shape != base.shape:
            raise BadInput(f"rope: short_factor has {len(factors)} entries for heads of width {head_dim}")
        return base / factors
    raise BadInput(
        f"rope_type {kind!r} cannot be trained: a drafter computes default, linear, dynamic, yarn, longrope, llama3; "
        "start from a drafter that has one of these (finetune_from)"
    )


def rotation_scale(rope: dict[str, Any]) -> float:
    """What cosine and sine are multiplied by: yarn and longrope sharpen attention with the length they reach.

    Raises:
        BadInput: a scaling field that is missing.

    Source: transformers 5.19.0 `modeling_rope_utils.py`.
    """
    kind = rope.get("rope_type", "default")
    if kind not in ("yarn", "longrope"):
        return 1.0
    if (given := rope.get("attention_factor")) is not None:
        return float(given)
    with _every_field_there(rope):
        factor = float(rope["factor"])
        if kind == "longrope":
            original = float(rope["original_max_position_embeddings"])
            return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    both = rope.get("mscale"), rope.get("mscale_all_dim")
    if both[0] and both[1]:
        return _sharpening(factor, float(both[0])) / _sharpening(factor, float(both[1]))
    return _sharpening(factor, 1.0)


def latent_scale(rope: dict[str, Any]) -> float:
    """What the scores of latent attention are multiplied by besides 1 / sqrt(width), where yarn names mscale_all_dim.

    Source: DeepSeek-V3; transformers 5.19.0 `yarn_apply_mscale`.
    """
    mscale = rope.get("mscale_all_dim")
    if rope.get("rope_type") != "yarn" or not mscale:
        return 1.0
    return _sharpening(float(rope["factor"]), float(mscale)) ** 2


def longest_text(rope: dict[str, Any], max_position_embeddings: int) -> int | None:
    """Tokens up to which a `dynamic` or `longrope` rotation does not depend on the text's length; None: any other."""
    kind = rope.get("rope_type", "default")
    if kind == "dynamic":
        return int(rope.get("original_max_position_embeddings", max_position_embeddings))
    with _every_field_there(rope):
        return int(rope["original_max_position_embeddings"]) if kind == "longrope" else None


def _sharpening(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(base: Tensor, rope: dict[str, Any]) -> Tensor:
    """Channels that turn less than `beta_slow` times in the original context are divided by the factor, those that turn
    more than `beta_fast` times kept, the ones between blended by their place.
    """
    count, theta = len(base), float(rope["rope_theta"])
    factor, original = float(rope["factor"]), float(rope["original_max_position_embeddings"])

    def place(turns: float) -> float:
        """The channel pair, as a fraction, that makes so many turns."""
        return count * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    low, high = place(float(rope.get("beta_fast") or 32)), place(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * count - 1)
    stretched = ((torch.arange(count, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return base * (1 - stretched) + base / factor * stretched


def _llama3(base: Tensor, rope: dict[str, Any]) -> Tensor:
    """Long waves are divided by the factor, short ones kept, the ones between blended."""
    factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    wavelengths_per_context = float(rope["original_max_position_embeddings"]) * base / (2 * math.pi)
    kept = ((wavelengths_per_context - low) / (high - low)).clamp(0, 1)
    return base * (kept + (1 - kept) / factor)


def rotation(
    inverse_frequencies_: Tensor, positions_T: Tensor, dtype: torch.dtype, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position, times a scale: two [T, 1, hd / 2] of `dtype`; positions_T is int64 [T]."""
    angles = positions_T.to(inverse_frequencies_.device)[:, None].float() * inverse_frequencies_[None, :]
    return (angles.cos()[:, None] * scale).to(dtype), (angles.sin()[:, None] * scale).to(dtype)


def rotate(x_TnD: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Turn channel i against channel i + hd/2, as Llama does; [T, n, hd] in and out."""
    cos, sin = cos_sin
    first, second = x_TnD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotate_pairs(x_TnD: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Turn channel 2i against channel 2i + 1, as DeepSeek does; the result has all first ones, then all second ones."""
    cos, sin = cos_sin
    first, second = x_TnD[..., 0::2], x_TnD[..., 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
