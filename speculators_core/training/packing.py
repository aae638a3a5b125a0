"""Several documents in one row, and which draft chains of the row are trained.

Nothing is padded: documents lie one after the other, each with positions of its own, and no chain
sees or predicts a token of another document (`masks.steps_left` ends with the turn).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculators_core.data.masks import steps_left
from speculators_core.data.states import States
from speculators_core.training.attention import Queries, Span


@dataclass(frozen=True)
class Document:
    """One chat with the verifier's states."""

    ids: Tensor  # [S] int64
    mask: Tensor  # [S] bool
    states: States


@dataclass(frozen=True)
class Packed:
    """A batch of T tokens in which C draft chains start. All indices are into the row."""

    ids: Tensor  # [T] int64
    positions: Tensor  # [T], each document from 0
    aux: Tensor  # [T, n_aux*H]
    final: Tensor  # [T, H], before the final norm
    best: Tensor  # [T] the verifier's first choice for the next token, -1 where not asked
    lengths: list[int]  # of the documents
    starts: Tensor  # [C] ascending: t of every chain, the newest token being ids[t+1]
    left: Tensor  # [C] steps that the chain can be checked for, at least 1
    chains: list[int]  # chains of each document

    def tokens(self) -> Queries:
        """Every token asking, each seeing its document up to itself."""
        return self._queries(self.lengths, self.positions + 1)

    def asking(self, live: Tensor) -> Queries:
        """The chains `live` [M] (ascending) asking, each seeing its document up to its start."""
        ends = torch.tensor(self.chains).cumsum(0)
        before = torch.searchsorted(live.cpu().contiguous(), ends)
        counts = torch.diff(before, prepend=before.new_zeros(1)).tolist()
        return self._queries(counts, self.positions[self.starts[live]] + 1)

    def _queries(self, counts: list[int], sees: Tensor) -> Queries:
        """`counts` queries of each document, one document after the other."""
        spans, row, key = [], 0, 0
        for count, length in zip(counts, self.lengths, strict=True):
            if count:
                spans.append(Span(slice(row, row + count), slice(key, key + length)))
            row, key = row + count, key + length
        return Queries(tuple(spans), sees)


def pack(documents: Sequence[Document], device: torch.device | str = "cpu") -> Packed:
    """Lay documents one after the other."""
    lengths = [len(d.ids) for d in documents]
    left = [steps_left(d.mask) for d in documents]
    all_left = torch.cat(left)
    starts = (all_left > 0).nonzero().flatten()
    return Packed(
        ids=torch.cat([d.ids for d in documents]).to(device),
        positions=torch.cat([torch.arange(n) for n in lengths]).to(device),
        aux=torch.cat([d.states.aux for d in documents]).to(device, torch.float32),
        final=torch.cat([d.states.final for d in documents]).to(device, torch.float32),
        best=torch.cat([d.states.best for d in documents]).to(device, torch.int64),
        lengths=lengths,
        starts=starts.to(device),
        left=all_left[starts].to(device),
        chains=[int((part > 0).sum()) for part in left],
    )


def batches(lengths: Sequence[int], budget: int, order: Sequence[int]) -> list[list[int]]:
    """Documents in `order`, cut into batches of at most `budget` tokens (a longer document is a
    batch of its own)."""
    result: list[list[int]] = []
    filled = 0
    for document in order:
        if result and filled + lengths[document] <= budget:
            result[-1].append(document)
            filled += lengths[document]
        else:
            result.append([document])
            filled = lengths[document]
    return result


def epoch_order(documents: Sequence[int], seed: int, epoch: int) -> list[int]:
    """The documents of one epoch, shuffled by seed and epoch alone: a resumed run needs no more
    than the two numbers to continue in the same order."""
    order = list(documents)
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order
