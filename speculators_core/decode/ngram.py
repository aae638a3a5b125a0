"""The n-gram drafter: what followed the last few tokens when they occurred before.

Prompt lookup as vLLM 0.32 does it: the longest suffix of the context of `longest` to `shortest`
tokens that occurs earlier, at its earliest place; what followed it there is the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from speculators_core.decode.drafter import Draft, Drafting
from speculators_core.decode.sampling import Sampler


@dataclass(frozen=True)
class NgramDrafter:
    """Needs no model and no verifier states; drafts nothing where nothing repeats."""

    longest: int = 4
    shortest: int = 1
    name: str = "ngram"
    aux_layers: tuple[int, ...] = ()

    def begin(self, first_token: int, capacity: int, sampler: Sampler) -> Drafting:
        return _NgramDrafting(first_token, self.longest, self.shortest)


class _NgramDrafting:
    """The context, and where each n-gram of it first ended."""

    def __init__(self, first_token: int, longest: int, shortest: int) -> None:
        self.sizes = range(longest, shortest - 1, -1)
        self.context: list[int] = []
        self.first_end: dict[tuple[int, ...], int] = {}
        self.absorb([first_token], None)

    def absorb(self, tokens: Sequence[int], aux: Tensor | None) -> None:
        for token in tokens:
            for size in self.sizes:  # n-grams that end before this token have something after them
                if size <= len(self.context):
                    self.first_end.setdefault(tuple(self.context[-size:]), len(self.context))
            self.context.append(token)

    def propose(self, k: int) -> Draft:
        for size in self.sizes:
            if size < len(self.context):
                end = self.first_end.get(tuple(self.context[-size:]))
                if end is not None:
                    return Draft(tuple(self.context[end : end + k]))
        return Draft()
