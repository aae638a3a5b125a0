"""Learning rate over the steps: warm-up, then a curve; and how many steps there are.

The plan can be shortened on the way, when time runs short. The curve then bends from where it is
and still ends where it would have: only the pace changes, never the value at that step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from speculators_core.params import TrainParams

WARMUP = 0.02  # share of the steps, where a schedule warms up and nothing else is asked

_CURVES: dict[str, Callable[[float], float]] = {
    "cosine": lambda share: 0.5 * (1 + math.cos(math.pi * share)),
    "linear": lambda share: 1 - share,
    "constant": lambda share: 1.0,
    "constant_with_warmup": lambda share: 1.0,
}
"""From the share of the steps behind the warm-up to the share of the peak rate."""


@dataclass
class Schedule:
    """`total` steps; the share `done_at` of the curve was done at step `since`."""

    total: int
    warmup_ratio: float
    since: int = 0
    done_at: float = 0.0
    shape: str = "cosine"

    def share(self, step: int) -> float:
        """How much of the curve is done at `step`, 0..1."""
        left = max(self.total - self.since, 1)
        return min(1.0, self.done_at + (1 - self.done_at) * (step - self.since) / left)

    def factor(self, step: int) -> float:
        """What the peak learning rate is multiplied with at `step` (from 0)."""
        share = self.share(step)
        if share < self.warmup_ratio:
            return (share + 1 / self.total) / (self.warmup_ratio + 1 / self.total)
        return _CURVES[self.shape]((share - self.warmup_ratio) / (1 - self.warmup_ratio))

    def shorten(self, step: int, total: int) -> None:
        """End at `total` instead, without a jump at `step`."""
        if step < total < self.total:
            self.done_at, self.since, self.total = self.share(step), step, total

    def state(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Schedule:
        return cls(**state)


def planned(params: TrainParams, total: int) -> Schedule:
    """The schedule that the parameters ask for, over `total` steps."""
    warmup = params.warmup_ratio
    if warmup is None:
        warmup = 0.0 if params.schedule == "constant" else WARMUP
    return Schedule(total, warmup, shape=params.schedule)
