"""Running means of what training and validation count, under the names that are logged."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from speculators_core.training.loss import Unrolled
from speculators_core.training.world import World


@dataclass
class Meter:
    """Adds up batches since the last reading. Training and validation each have their own."""

    steps: int
    world: World = field(default_factory=World)
    loss: Tensor = field(init=False)
    live: Tensor = field(init=False)
    accepted: Tensor = field(init=False)
    chains: int = 0
    covered: int = 0
    walk_tokens: int = 0
    walk_steps: int = 0
    tokens: int = 0
    since: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.loss = torch.zeros(self.steps, dtype=torch.float64)
        self.live = torch.zeros(self.steps, dtype=torch.int64)
        self.accepted = torch.zeros(self.steps, dtype=torch.int64)

    def add(self, result: Unrolled, tokens: int, left: Tensor) -> None:
        """One batch of `tokens` tokens; `left` [C] as in `Packed`."""
        self.loss += result.step_losses.double().cpu()
        self.live += result.live
        self.accepted += result.accepted.sum(0).cpu()
        self.chains += len(left)
        self.covered += result.covered
        self.tokens += tokens
        walked, steps = walk(result.accepted, left)
        self.walk_tokens += walked
        self.walk_steps += steps

    def read(self) -> dict[str, float]:
        """The means over all processes, by name. Empty where nothing was added."""
        counts = [self.chains, self.covered, self.walk_tokens, self.walk_steps, self.tokens]
        mine = [self.loss, self.live, self.accepted, torch.tensor(counts)]
        sums = self.world.sum(torch.cat([part.double() for part in mine])).cpu()
        loss, live, accepted = sums[: 3 * self.steps].view(3, -1)
        chains, covered, walk_tokens, walk_steps, tokens = sums[3 * self.steps :].tolist()
        if not chains:
            return {}
        losses, shares = ((total / live.clamp(min=1)).tolist() for total in (loss, accepted))
        return {
            "loss": sum(losses),
            **{f"loss_{k}": value for k, value in enumerate(losses)},
            **{f"acceptance_{k}": value for k, value in enumerate(shares)},
            "acceptance_length": 1 + sum(shares),
            "served_acceptance_length": walk_tokens / walk_steps,
            "coverage": covered / chains,
            "tokens_per_second": tokens / max(time.monotonic() - self.since, 1e-9),
        }


def walk(accepted: Tensor, left: Tensor) -> tuple[int, int]:
    """(tokens, decoding steps) that serving would take over the same answers, greedily.

    `accepted` [C, K] of consecutive chains, `left` [C] (falling to 1 at the end of each turn). A
    served step that accepts n tokens goes on n + 1 chains later, so chains behind a miss, where
    drafting is hard, weigh more than in the mean over all chains.
    """
    runs, rest = accepted.sum(1).tolist(), left.tolist()
    tokens = steps = chain = 0
    while chain < len(runs):
        advance = min(runs[chain] + 1, rest[chain])
        tokens, steps, chain = tokens + advance, steps + 1, chain + advance
    return tokens, steps
