"""What acceptance numbers mean here, in one place.

Only steps that drafted count. Acceptance length = 1 + accepted / steps (the 1 is the verifier's
own token); acceptance rate = accepted / drafted; position i = share of steps that accepted more
than i tokens (joint, not conditional). Answers are weighted by their steps: never a mean of means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from speculators_core.decode.engine import Step

RESAMPLES = 2000


@dataclass(frozen=True)
class Counts:
    """One answer: `histogram[a]` steps accepted a tokens, of `drafted` tokens in all."""

    histogram: tuple[int, ...] = ()
    drafted: int = 0
    tokens: int = 0

    @property
    def steps(self) -> int:
        return sum(self.histogram)

    @property
    def accepted(self) -> int:
        return sum(a * steps for a, steps in enumerate(self.histogram))


class Acceptance(BaseModel):
    """Acceptance over some answers. `interval` holds 95 % of acceptance lengths when the answers
    are drawn again (bootstrap). Without a step that drafted, the length is 1: one token a step."""

    model_config = ConfigDict(frozen=True)

    acceptance_length: float
    acceptance_rate: float
    per_position: list[float]
    interval: tuple[float, float]
    steps: int
    tokens: int


def counted(steps: Sequence[Step], k: int) -> Counts:
    """The counts of one answer of the reference engine, for K = k."""
    accepted = Counter(step.accepted for step in steps if step.drafted)
    return Counts(
        tuple(accepted[a] for a in range(k + 1)),
        drafted=sum(len(step.drafted) for step in steps),
        tokens=sum(len(step.emitted) for step in steps),
    )


def acceptance(answers: Sequence[Counts], k: int, seed: int = 0) -> Acceptance:
    """The numbers over `answers`, for K = k drafted tokens a step."""
    steps = sum(answer.steps for answer in answers)
    accepted = sum(answer.accepted for answer in answers)
    drafted = sum(answer.drafted for answer in answers)
    beyond = [sum(sum(a.histogram[i + 1 :]) for a in answers) for i in range(k)]
    return Acceptance(
        acceptance_length=1 + accepted / steps if steps else 1.0,
        acceptance_rate=accepted / drafted if drafted else 0.0,
        per_position=[count / steps if steps else 0.0 for count in beyond],
        interval=_interval(answers, seed),
        steps=steps,
        tokens=sum(answer.tokens for answer in answers),
    )


def _interval(answers: Sequence[Counts], seed: int) -> tuple[float, float]:
    steps = np.array([answer.steps for answer in answers])
    accepted = np.array([answer.accepted for answer in answers])
    if not steps.sum():
        return 1.0, 1.0
    drawn = np.random.default_rng(seed).integers(len(steps), size=(RESAMPLES, len(steps)))
    total = steps[drawn].sum(axis=1)
    lengths = 1 + accepted[drawn].sum(axis=1)[total > 0] / total[total > 0]
    low, high = np.quantile(lengths, (0.025, 0.975))
    return float(low), float(high)
