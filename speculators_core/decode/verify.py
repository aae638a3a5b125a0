"""The verifier's side of a request: its cache, its passes, the states it shows to the draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from speculators_core.decode.cache import KVStore, VerifierCache
from speculators_core.errors import PairingError
from speculators_core.models.verifier import Verifier

_CACHEABLE = {"full_attention", "sliding_attention"}


class Verifying:
    """One request's verifier state. `seen` is the open `Verifier.watching` dict of `aux_layers`."""

    def __init__(
        self,
        verifier: Verifier,
        capacity: int,
        seen: Mapping[int, Tensor],
        aux_layers: Sequence[int],
    ) -> None:
        self.model = verifier.model
        self.store = KVStore(len(verifier.layers), capacity)
        self.cache = VerifierCache(self.store)
        self.seen = seen
        self.aux_layers = aux_layers

    def read(self, tokens: Sequence[int], *, logits_of: int) -> Tensor:
        """One pass over tokens behind what is kept; logits [logits_of, V] of the last ones.

        The tokens count only once `keep` says so.
        """
        start, device = self.store.length, self.model.device
        out = self.model(
            input_ids=torch.tensor([list(tokens)], device=device),
            position_ids=torch.arange(start, start + len(tokens), device=device)[None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=logits_of,
        )
        logits: Tensor = out.logits[0]
        return logits

    def keep(self, tokens: int) -> Tensor | None:
        """Make the first `tokens` of the last pass count; their aux states [1, S, n_aux*H]."""
        self.store.advance(tokens)
        if not self.aux_layers:
            return None
        return torch.cat([self.seen[k][:, :tokens] for k in self.aux_layers], dim=-1)


def check_cacheable(verifier: Verifier) -> None:
    """Raise unless every layer keeps ordinary keys and values, which can be rewound."""
    config = verifier.model.config.get_text_config()
    other = set(getattr(config, "layer_types", None) or ()) - _CACHEABLE
    if other:
        raise PairingError(
            f"the verifier has layers of type {', '.join(sorted(other))}; "
            f"the reference engine can only rewind {' and '.join(sorted(_CACHEABLE))}",
            where=verifier.facts.path,
            hint="serve it with vLLM",
        )
