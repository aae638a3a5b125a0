"""Which documents are trained when: a function of the data, the seed and the place alone.

An epoch is all documents, shuffled and packed into rows; an optimiser step is `rows` of them, cut
among the processes. A step's rows and a run's steps don't depend on who computes them, so two
processes train what one would with twice the rows a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from speculators_core.data.masks import steps_left
from speculators_core.data.prepare import Prepared
from speculators_core.training.packing import batches, epoch_order

Rows = list[list[int]]
"""Documents of each row of an optimiser step."""


@dataclass
class Order:
    """`rows` packed rows of up to `budget` tokens are an optimiser step."""

    prepared: Prepared
    documents: list[int]
    seed: int
    epochs: int
    budget: int
    rows: int
    _at: tuple[int, list[Rows]] = field(init=False, default=(-1, []))

    def __post_init__(self) -> None:
        self.lengths: list[int] = self.prepared.lengths.tolist()

    def total(self) -> int:
        """Steps of the whole run."""
        return sum(len(self._packed(epoch)) for epoch in range(self.epochs))

    def steps(self, epoch: int) -> list[Rows]:
        if self._at[0] != epoch:
            self._at = (epoch, self._packed(epoch))
        return self._at[1]

    def live(self, rows: Rows, steps: int) -> Tensor:
        """[steps] int64: chains of these rows that reach each draft step."""
        masks = [self.prepared.document(number)[1] for row in rows for number in row]
        left = torch.cat([steps_left(mask) for mask in masks] or [torch.zeros(0)])
        return torch.stack([(left > k).sum() for k in range(steps)])

    def _packed(self, epoch: int) -> list[Rows]:
        packed = batches(self.lengths, self.budget, epoch_order(self.documents, self.seed, epoch))
        return [packed[at : at + self.rows] for at in range(0, len(packed), self.rows)]
