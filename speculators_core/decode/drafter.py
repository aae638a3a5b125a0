"""What a drafter is to the decoding loop.

A `Drafter` is a model or a rule that is loaded once; `begin` opens a `Drafting`, its memory of
one request. The loop tells a drafting every token that the verifier has settled, together with
the verifier's aux states at the position before each, and asks it for what may come next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from speculators_core.decode.sampling import Sampler


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens proposed for one step, possibly none.

    `p` is the drafter's own probability of each token; None where it has none. `q` [k, V] is the
    distribution that each token was drawn from; None where it was chosen, not drawn.
    """

    ids: tuple[int, ...] = ()
    p: tuple[float, ...] | None = None
    q: Tensor | None = None


class Drafting(Protocol):
    """One request's drafting state."""

    def absorb(self, tokens: Sequence[int], aux: Tensor | None) -> None:
        """Learn the settled tokens x_{t+1}.. and the aux states g_t.. [1, S, n_aux*H], S tokens.

        The very first token of a request has no position before it and is never told.
        """

    def propose(self, k: int) -> Draft:
        """At most `k` tokens to follow the last settled one. The state stays as absorbed."""


class Drafter(Protocol):
    """A way to draft."""

    @property
    def name(self) -> str:
        """For people: `eagle3`, `ngram`."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The verifier states it needs, after k layers; empty where it needs none."""

    def begin(self, first_token: int, capacity: int, sampler: Sampler) -> Drafting:
        """A fresh state for a request that starts with a token; `capacity` counts drafted ones."""
