"""How tokens are chosen, and how a draft is judged so that the verifier's distribution holds.

Rejection sampling (arXiv 2211.17192, 2302.01318): a drafted token x is accepted with probability
min(1, p(x)/q(x)); at the first rejection the token is drawn from the residual max(p - q, 0),
after a full acceptance from p. A token that was chosen, not drawn, has q = 1 at itself: it is
accepted with probability p(x), and the residual is p without it. At temperature 0 both reduce to
comparing with the verifier's argmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from speculators_core.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Verdict:
    """`accepted` drafted tokens stand, `token` follows; `p` is what the verifier gave each."""

    accepted: int
    token: int
    p: tuple[float, ...]


class Sampler:
    """One request's sampling: temperature, top-k, top-p and a random stream of its own."""

    def __init__(self, params: SamplingParams, device: torch.device | str = "cpu") -> None:
        self.params = params
        self.generator = torch.Generator(device)
        if params.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(params.seed)

    @property
    def greedy(self) -> bool:
        return self.params.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """[..., V] logits → the distribution [..., V] that tokens are drawn from."""
        logits = logits.float()
        if self.greedy:
            best = logits.argmax(-1, keepdim=True)
            return torch.zeros_like(logits).scatter_(-1, best, 1.0)
        logits = logits / self.params.temperature
        k = self.params.top_k
        if 0 < k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(k).values[..., -1:], -torch.inf)
        p = logits.softmax(-1)
        return _nucleus(p, self.params.top_p) if self.params.top_p < 1 else p

    def draw(self, p: Tensor) -> int:
        """A token from the distribution p [V], which need not be normalised."""
        return int(torch.multinomial(p, 1, generator=self.generator))

    def judge(self, logits: Tensor, drafted: tuple[int, ...], q: Tensor | None) -> Verdict:
        """Judge k drafted tokens by the verifier's logits [k+1, V]; `q` as in `Draft`."""
        if self.greedy:
            return _compare(logits, drafted)
        p = self.probabilities(logits)
        p_drafted = _at(p, drafted)
        for i, token in enumerate(drafted):
            own = 1.0 if q is None else float(q[i, token])
            if self._uniform() * own < p_drafted[i]:
                continue
            residual = _residual(p[i], token, None if q is None else q[i])
            if residual is not None:
                return Verdict(i, self.draw(residual), p_drafted)
        return Verdict(len(drafted), self.draw(p[len(drafted)]), p_drafted)

    def _uniform(self) -> float:
        """In [0, 1)."""
        return float(torch.rand((), generator=self.generator, device=self.generator.device))


def _compare(logits: Tensor, drafted: tuple[int, ...]) -> Verdict:
    best = logits.argmax(-1).tolist()
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == best[accepted]:
        accepted += 1
    p = _at(logits[: len(drafted)].float().softmax(-1), drafted)
    return Verdict(accepted, best[accepted], p)


def _at(p: Tensor, tokens: tuple[int, ...]) -> tuple[float, ...]:
    """p [≥k, V] at each of k tokens."""
    return tuple(p[list(range(len(tokens))), list(tokens)].tolist()) if tokens else ()


def _residual(p: Tensor, token: int, q: Tensor | None) -> Tensor | None:
    """What is left of p [V] when q is taken away; None where rounding leaves nothing."""
    if q is None:
        rest = p.clone()
        rest[token] = 0.0
    else:
        rest = (p - q).clamp_min_(0.0)
    return rest if float(rest.sum()) > 0 else None


def _nucleus(p: Tensor, share: float) -> Tensor:
    """Keep the fewest tokens whose probabilities reach `share`; renormalised."""
    ordered, ids = p.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    ordered = ordered.masked_fill(before >= share, 0.0)
    kept = torch.zeros_like(p).scatter_(-1, ids, ordered)
    return kept / kept.sum(-1, keepdim=True)
