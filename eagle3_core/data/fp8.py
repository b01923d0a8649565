"""Hidden states in eight bits: float8 e4m3 codes, and a scale for each token and layer.

A token's states differ in size by orders of magnitude between layers and between tokens, within one state by less. The
scale is a power of two: of a floating-point format it moves the range alone, and code times scale is exact in bfloat16.

n tokens, L slots (aux states and the last one), H hidden.
"""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
_LARGEST = 448.0
"""The largest number of e4m3. Source: OCP 8-bit Floating Point Specification, revision 1.0."""

MAX_SCALE = 2.0**120
"""The scale of the largest number there is in bfloat16."""


def quantise(states_NLH: Tensor) -> tuple[Tensor, Tensor]:
    """Codes float8_e4m3fn [n, L, H] and scales float32 [n, L], powers of two; each state fills its range to a half.

    Args:
        states_NLH: float [n, L, H], finite.
    """
    largest_NL = torch.maximum(states_NLH.amax(-1), -states_NLH.amin(-1)).float()
    exponents_NL = torch.frexp(largest_NL / _LARGEST).exponent
    scales_NL = torch.ldexp(torch.ones_like(largest_NL), exponents_NL)
    return (states_NLH / scales_NL[..., None].to(states_NLH.dtype)).to(FP8), scales_NL


def dequantise(codes_NLH: Tensor, scales_NL: Tensor) -> Tensor:
    """The states, bfloat16 [n, L, H].

    Args:
        codes_NLH: float8_e4m3fn [n, L, H].
        scales_NL: float32 [n, L].
    """
    return codes_NLH.to(torch.bfloat16) * scales_NL[..., None].to(torch.bfloat16)
