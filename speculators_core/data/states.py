"""Where the verifier's states come from: whole documents in, states of each token out.

Training asks a `StateProducer`. `InProcess` runs the verifier here; `data.vllm_states` asks a
vLLM server. Both give the same numbers, so a cache does not care who filled it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from speculators_core.errors import Stopped
from speculators_core.models.verifier import Verifier

TOKENS_A_FORWARD = 2048
Tokens = tuple[Tensor, Tensor]
"""A document: ids [S] int64, mask [S] bool."""


@dataclass(frozen=True)
class States:
    """The verifier's states of one document: aux [S, n_aux*H] after the aux layers, ascending;
    final [S, H] after the last layer, before the final norm; and its first choice for the next
    token, best [S] int32, -1 where none is trained on."""

    aux: Tensor
    final: Tensor
    best: Tensor


class StateProducer(Protocol):
    """Gives states of documents, in their order and in the verifier's own precision."""

    @property
    def verifier(self) -> Verifier:
        """Its ends at least: embedding, final norm and head."""

    @property
    def layers(self) -> Sequence[int]:
        """Ascending ids of the aux layers ("after k layers")."""

    @property
    def made_by(self) -> str:
        """The program that computes, for the cache's header."""

    def states(
        self, documents: Sequence[Tokens], stopping: Callable[[], bool] = lambda: False
    ) -> list[States]:
        """Raises `Stopped` as soon as it can when `stopping` says so."""


class InProcess:
    """The verifier that is loaded here."""

    made_by = "transformers"

    def __init__(self, verifier: Verifier, layers: Sequence[int]) -> None:
        self.verifier = verifier
        self.layers = sorted(layers)

    def states(
        self, documents: Sequence[Tokens], stopping: Callable[[], bool] = lambda: False
    ) -> list[States]:
        """Forward passes of equal-ish lengths, padded behind, where causal attention never
        looks: at most `TOKENS_A_FORWARD` tokens each, or one longer document."""
        last = self.verifier.facts.num_hidden_layers
        lengths = [len(ids) for ids, _ in documents]
        found: dict[int, States] = {}
        for group in _groups(lengths):
            if stopping():
                raise Stopped("stopped while hidden states were computed")
            ids = nn.utils.rnn.pad_sequence([documents[i][0] for i in group], batch_first=True)
            seen = self.verifier.states(ids.to(self.verifier.device), [*self.layers, last])
            for row, i in enumerate(group):
                aux = torch.cat([seen[k][row, : lengths[i]] for k in self.layers], dim=-1)
                final = seen[last][row, : lengths[i]].clone()
                best = first_choices(self.verifier, final, documents[i][1])
                found[i] = States(aux, final, best)
        return [found[i] for i in range(len(documents))]


@torch.no_grad()
def first_choices(verifier: Verifier, final: Tensor, mask: Tensor) -> Tensor:
    """[S] int32: what the verifier would say next, at tokens of a turn that is not over there."""
    asked = (mask[:-1] & mask[1:]).nonzero().flatten().to(final.device)
    best = torch.full((len(mask),), -1, dtype=torch.int32, device=final.device)
    best[asked] = verifier.logits(final[asked]).argmax(-1).to(torch.int32)
    return best


def _groups(lengths: Sequence[int]) -> list[list[int]]:
    """Documents by length, neighbours together while their padded size stays in the budget."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if groups and (len(groups[-1]) + 1) * lengths[i] <= TOKENS_A_FORWARD:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups
