"""What a drafter can be trained for: divergences between the verifier's distribution p and the drafter's q, both over
the draft vocabulary.

    forward_kl   sum p log(p / q)
    soft_ce      -sum p log q                                   the gradient of forward_kl
    reverse_kl   sum q log(q / p)
    jsd          KL(p || m) / 2 + KL(q || m) / 2, m = (p + q) / 2
    tv           1 - a,  a = sum min(p, q): the share of tokens that sampling would accept
    lk_alpha     -log a
    lk_hybrid    w * forward_kl + (1 - w) * tv,  w = exp(-3 a), which is not differentiated

Source: Lin 1991 (jsd); Samarin et al. 2026, arXiv 2602.23881 (lk_alpha, lk_hybrid).

C rows, D draft vocabulary.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from eagle3_core.contract.params import LossName

Loss = Callable[[Tensor, Tensor], Tensor]
"""(log p [C, D], log q [C, D]), float32 -> nats (tv: a share) [C]."""

LK_SHARPNESS = 3.0
SMALLEST_SHARE = 1e-5


def forward_kl(logp_CD: Tensor, logq_CD: Tensor) -> Tensor:
    """See the module."""
    return (logp_CD.exp() * (logp_CD - logq_CD)).sum(-1)


def soft_ce(logp_CD: Tensor, logq_CD: Tensor) -> Tensor:
    """See the module."""
    return -(logp_CD.exp() * logq_CD).sum(-1)


def reverse_kl(logp_CD: Tensor, logq_CD: Tensor) -> Tensor:
    """See the module."""
    return (logq_CD.exp() * (logq_CD - logp_CD)).sum(-1)


def jsd(logp_CD: Tensor, logq_CD: Tensor) -> Tensor:
    """See the module."""
    logm_CD = torch.logaddexp(logp_CD, logq_CD) - math.log(2)
    return (forward_kl(logp_CD, logm_CD) + forward_kl(logq_CD, logm_CD)) / 2


def acceptance(logp_CD: Tensor, logq_CD: Tensor) -> Tensor:
    """sum min(p, q) [C]."""
    return torch.minimum(logp_CD, logq_CD).exp().sum(-1)


def tv(logp_CD: Tensor, logq_CD: Tensor) -> Tensor:
    """See the module."""
    return 1 - acceptance(logp_CD, logq_CD)


def lk_alpha(logp_CD: Tensor, logq_CD: Tensor) -> Tensor:
    """See the module; a row that shares less than SMALLEST_SHARE has no gradient."""
    return -acceptance(logp_CD, logq_CD).clamp_min(SMALLEST_SHARE).log()


def lk_hybrid(logp_CD: Tensor, logq_CD: Tensor) -> Tensor:
    """See the module."""
    distance = tv(logp_CD, logq_CD)
    weight = (-LK_SHARPNESS * (1 - distance.detach())).exp()
    return weight * forward_kl(logp_CD, logq_CD) + (1 - weight) * distance


LOSSES: dict[LossName, Loss] = {
    "forward_kl": forward_kl,
    "soft_ce": soft_ce,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "tv": tv,
    "lk_alpha": lk_alpha,
    "lk_hybrid": lk_hybrid,
}


def mixture(weights: Mapping[LossName, float]) -> Loss | None:
    """The weighted sum of losses; None for forward_kl alone, for which `score` has a faster way."""
    if dict(weights) == {"forward_kl": 1.0}:
        return None

    def loss(logp_CD: Tensor, logq_CD: Tensor) -> Tensor:
        parts = [weight * LOSSES[name](logp_CD, logq_CD) for name, weight in weights.items()]
        return torch.stack(parts).sum(0)

    return loss
