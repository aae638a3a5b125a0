"""Documents whose states hold NaN or infinity: set aside, counted, and above a share an end.

Cached states are judged when they are made. States that are computed as training goes are judged
as they come: the process that computes one tells the others after the step, which is then taken
again without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from speculators_core.data.hidden_states import check_quarantined
from speculators_core.progress import Progress
from speculators_core.training.world import World


@dataclass
class Quarantine:
    """`count` documents there are, of which `documents` are not used, as every process knows.
    `growing`: further ones may be found on the way.
    """

    count: int
    where: str  # what an error names
    progress: Progress
    documents: set[int] = field(default_factory=set)
    growing: bool = False
    _found: set[int] = field(default_factory=set)  # by this process, untold yet

    def __len__(self) -> int:
        return len(self.documents)

    def __contains__(self, document: int) -> bool:
        return document in self.documents

    def add(self, document: int) -> None:
        """This process has found one."""
        self._found.add(document)

    def settle(self, world: World) -> bool:
        """Tell each other what was found; whether it was anything. Every process must ask.

        Raises `DataError` where more documents are unusable than may be.
        """
        if not self.growing or not int(world.sum(torch.tensor(len(self._found)))):
            return False
        found = torch.zeros(self.count, dtype=torch.int64)
        found[list(self._found)] = 1
        self._found.clear()
        fresh = set(world.sum(found).nonzero().flatten().tolist()) - self.documents
        for document in sorted(fresh):
            self.progress.note(
                f"document {document} is quarantined: its states hold NaN or infinity"
            )
        self.documents |= fresh
        check_quarantined(len(self.documents), self.count, self.where)
        return True
