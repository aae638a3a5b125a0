"""What a family does to the product of its head before it calls it logits: scale it, cap it.

A verifier's distribution is softmax of *these*; a draft's targets built from the bare product
would be too sharp or too flat. `Verifier.check_head` compares the rule with the model itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

_MULTIPLIES = ("logit_scale", "lm_head_multiplier")  # Cohere; Falcon-H1
_DIVIDES = ("logits_scaling",)  # Granite
_CAPS = ("final_logit_softcapping", "logits_soft_cap")  # Gemma 2, 3 and 4; RecurrentGemma


@dataclass(frozen=True)
class LogitRule:
    """z becomes scale * z, then cap * tanh(z / cap) where there is a cap. Order is kept."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, product: Tensor) -> Tensor:
        scaled = product if self.scale == 1.0 else product * self.scale
        return scaled if self.cap is None else (scaled / self.cap).tanh() * self.cap


def rule_of(config: Any) -> LogitRule:
    """The rule that a text model's config names; none for most families."""
    scale = 1.0
    for name in _MULTIPLIES:
        scale *= _number(config, name) or 1.0
    for name in _DIVIDES:
        scale /= _number(config, name) or 1.0
    caps = (_number(config, name) for name in _CAPS)
    return LogitRule(scale, next((cap for cap in caps if cap), None))


def _number(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) else None
