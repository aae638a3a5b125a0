"""Learning rate over the steps: warm-up, then a cosine to zero; and how many steps there are.

The plan can be shortened on the way, when time runs short. The cosine then bends from where it is
and still ends at zero: only the pace changes, never the value at that step.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass


@dataclass
class Schedule:
    """`total` steps; the share `done_at` of the curve was done at step `since`."""

    total: int
    warmup_ratio: float
    since: int = 0
    done_at: float = 0.0

    def share(self, step: int) -> float:
        """How much of the curve is done at `step`, 0..1."""
        left = max(self.total - self.since, 1)
        return min(1.0, self.done_at + (1 - self.done_at) * (step - self.since) / left)

    def factor(self, step: int) -> float:
        """What the peak learning rate is multiplied with at `step` (from 0)."""
        share = self.share(step)
        if share < self.warmup_ratio:
            return (share + 1 / self.total) / (self.warmup_ratio + 1 / self.total)
        return 0.5 * (1 + math.cos(math.pi * (share - self.warmup_ratio) / (1 - self.warmup_ratio)))

    def shorten(self, step: int, total: int) -> None:
        """End at `total` instead, without a jump at `step`."""
        if step < total < self.total:
            self.done_at, self.since, self.total = self.share(step), step, total

    def state(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def of(cls, state: dict[str, float]) -> Schedule:
        return cls(
            total=int(state["total"]),
            warmup_ratio=state["warmup_ratio"],
            since=int(state["since"]),
            done_at=state["done_at"],
        )
