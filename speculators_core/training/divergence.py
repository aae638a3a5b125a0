"""How far a draft's distribution is from the verifier's, and the slope of that by its logits.

With q = softmax(z) the draft's, p the verifier's (both over the draft vocabulary, p renormalised)
and α = Σ min(p, q), the share of drafted tokens that sampling would accept:

    kl          Σ p log(p / q)                          dz = q - p
    reverse_kl  Σ q log(q / p)                          dz = q (log(q / p) - reverse_kl)
    js          ½ KL(p ‖ m) + ½ KL(q ‖ m), m = (p+q)/2  dz = ½ q (log(q / m) - KL(q ‖ m))
    tv          ½ Σ |p - q| = 1 - α                     dz = q (s - Σ q s), s = ½ sign(q - p)
    nla         -log α                                  dz = dz(tv) / α
    lk_hybrid   λ kl + (1 - λ) tv, λ = exp(-3 α)        the same of both slopes, λ held fixed

The last two are the LK losses of arXiv 2602.23881 (3 is the paper's best η). Each function takes
log q [m, dv], p [m, dv] and the entropy of p [m] and gives values [m] and slopes [m, dv].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Divergence = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

_ETA = 3.0
_SMALLEST = 1e-30  # a probability that underflowed has a logarithm all the same
_LEAST_OVERLAP = 1e-5  # below it, -log α is flat, as in speculators


def kl(log_q: Tensor, p: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    return -(p * log_q).sum(-1) - entropy, log_q.exp().sub_(p)


def reverse_kl(log_q: Tensor, p: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    q, ratio = log_q.exp(), log_q - _log(p)
    value = (q * ratio).sum(-1)
    return value, q.mul_(ratio.sub_(value[:, None]))


def js(log_q: Tensor, p: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    q = log_q.exp()
    log_mean = _log((p + q) / 2)
    ratio = log_q - log_mean
    own = (q * ratio).sum(-1)
    value = (own - entropy - (p * log_mean).sum(-1)) / 2
    return value, q.mul_(ratio.sub_(own[:, None])).div_(2)


def tv(log_q: Tensor, p: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    q = log_q.exp()
    apart = q - p
    sign = apart.sign().div_(2)
    return apart.abs_().sum(-1) / 2, q.mul(sign.sub_((q * sign).sum(-1, keepdim=True)))


def nla(log_q: Tensor, p: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    far, slope = tv(log_q, p, entropy)
    overlap = (1 - far).clamp(min=_LEAST_OVERLAP)
    inside = (1 - far >= _LEAST_OVERLAP) / overlap
    return -overlap.log(), slope.mul_(inside[:, None])


def lk_hybrid(log_q: Tensor, p: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    (forward, toward), (far, slope) = kl(log_q, p, entropy), tv(log_q, p, entropy)
    share = (_ETA * (far - 1)).exp()
    value = share * forward + (1 - share) * far
    return value, toward.mul_(share[:, None]).add_(slope.mul_(1 - share[:, None]))


DIVERGENCES: dict[str, Divergence] = {
    "kl": kl,
    "reverse_kl": reverse_kl,
    "js": js,
    "tv": tv,
    "nla": nla,
    "lk_hybrid": lk_hybrid,
}


def mixture(weights: Mapping[str, float]) -> Divergence:
    """The weighted sum of some of them, by name."""
    if weights == {"kl": 1.0}:
        return kl

    def mixed(log_q: Tensor, p: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
        value, slope = torch.zeros_like(entropy), torch.zeros_like(log_q)
        for name, weight in weights.items():
            part, toward = DIVERGENCES[name](log_q, p, entropy)
            value, slope = value.add(part, alpha=weight), slope.add_(toward, alpha=weight)
        return value, slope

    return mixed


def _log(p: Tensor) -> Tensor:
    return p.clamp(min=_SMALLEST).log_()
