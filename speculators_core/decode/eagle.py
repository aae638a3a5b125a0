"""The EAGLE-3 drafter: a draft network run step by step over its own key-value cache.

Its first step of a round runs over the newly settled tokens with the verifier's true states, as
in vLLM; further steps continue from the draft's own states. Cache entries of settled tokens
therefore always come from true states, and those of drafted tokens live for one round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from speculators_core.checkpoint import load_speculator
from speculators_core.decode.cache import KVStore, draft_attention
from speculators_core.decode.drafter import Draft, Drafting
from speculators_core.decode.sampling import Sampler
from speculators_core.errors import PairingError
from speculators_core.models.eagle3 import Eagle3Draft
from speculators_core.models.verifier import Verifier


class EagleDrafter:
    """Drafts with an `Eagle3Draft` for a verifier.

    Tokens are the draft's argmax at any temperature, as in vLLM by default; `probabilistic` draws
    them from the draft's distribution instead. Raises `PairingError` where the two don't fit.
    """

    name = "eagle3"

    def __init__(
        self, draft: Eagle3Draft, verifier: Verifier, *, probabilistic: bool = False
    ) -> None:
        _check_pair(draft, verifier)
        self.draft = draft
        self.probabilistic = probabilistic
        self.aux_layers = tuple(draft.config.eagle_aux_hidden_state_layer_ids or ())

    def begin(self, first_token: int, capacity: int, sampler: Sampler) -> Drafting:
        drawn_by = sampler if self.probabilistic and not sampler.greedy else None
        return _EagleDrafting(self.draft, capacity, drawn_by)


def load_eagle(speculator: str | Path, verifier: Verifier) -> EagleDrafter:
    """The drafter of a speculator directory, beside the verifier and in its precision."""
    table = verifier.embedding
    draft = load_speculator(speculator, embedding=table, dtype=table.dtype, device=verifier.device)
    return EagleDrafter(draft, verifier)


@dataclass
class _Chain:
    """The tokens of one round, kept as tensors until all are drafted."""

    ids: list[Tensor] = field(default_factory=list)
    p: list[Tensor] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)

    def finished(self) -> Draft:
        ids, p = torch.cat(self.ids).flatten(), torch.cat(self.p).flatten()
        q = torch.stack(self.q) if self.q else None
        return Draft(tuple(ids.tolist()), tuple(p.tolist()), q)


class _EagleDrafting:
    def __init__(self, draft: Eagle3Draft, capacity: int, drawn_by: Sampler | None) -> None:
        self.draft = draft
        self.drawn_by = drawn_by
        self.store = KVStore(len(draft.layers), capacity)
        self.attend = draft_attention(self.store)
        self.newest: tuple[Tensor, Tensor] | None = None  # normed and next state, [1, 1, Hd] each

    def absorb(self, tokens: Sequence[int], aux: Tensor | None) -> None:
        assert aux is not None, "an EAGLE draft is always told the verifier's states"
        ids = torch.tensor([list(tokens)], device=aux.device)
        states = self.draft.combine(aux.to(self.draft.fc.weight.dtype))
        normed, hidden = self._step(ids, states)
        self.newest = normed[:, -1:], hidden[:, -1:]

    def propose(self, k: int) -> Draft:
        assert self.newest is not None, "nothing absorbed yet"
        if k == 0:
            return Draft()
        settled = self.store.length
        chain = _Chain()
        normed, hidden = self.newest
        for i in range(k):
            token = self._choose(self.draft.logits(normed)[0], chain)
            if i < k - 1:
                normed, hidden = self._step(token, hidden)
        self.store.advance(settled - self.store.length)  # drop the drafted tokens' entries
        return chain.finished()

    def _step(self, ids: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """One network step over ids [1, S] and states [1, S, Hd], behind what the cache holds."""
        start, count = self.store.length, ids.shape[1]
        positions = torch.arange(start, start + count, device=ids.device)[None]
        out = self.draft.step(ids, states, positions, self.attend)
        self.store.advance(count)
        return out

    def _choose(self, logits: Tensor, chain: _Chain) -> Tensor:
        """The next token [1, 1] (a verifier id) from draft logits [1, dv]; noted in the chain."""
        if self.drawn_by is None:
            p = logits.float().softmax(-1)
            choice = logits.argmax(-1, keepdim=True)
        else:
            p = self.drawn_by.probabilities(logits)
            choice = torch.tensor([[self.drawn_by.draw(p[0])]], device=logits.device)
            chain.q.append(self._over_verifier(p[0]))
        token = self.draft.to_verifier_ids(choice)
        chain.ids.append(token)
        chain.p.append(p.gather(-1, choice))
        return token

    def _over_verifier(self, p: Tensor) -> Tensor:
        """A distribution [dv] over the draft's vocabulary as one over the verifier's [V]."""
        ids = self.draft.to_verifier_ids(torch.arange(len(p), device=p.device))
        return p.new_zeros(self.draft.config.vocab_size).scatter_(0, ids, p)


def _check_pair(draft: Eagle3Draft, verifier: Verifier) -> None:
    config, facts = draft.config, verifier.facts
    if not config.eagle_aux_hidden_state_layer_ids:
        raise PairingError(
            "the draft does not say which verifier states it was trained on",
            where="config.json: eagle_aux_hidden_state_layer_ids",
            hint="convert it again with --aux-layers",
        )
    for what, own, theirs in (
        ("vocab_size", config.vocab_size, facts.vocab_size),
        ("hidden size of the aux states", config.verifier_hidden_size, facts.hidden_size),
    ):
        if own != theirs:
            raise PairingError(
                f"the draft was made for a verifier with {what} {own}, this one has {theirs}",
                where=facts.path,
                hint="give the verifier that the draft was trained for",
            )
