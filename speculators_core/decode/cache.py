"""Key-value caches that are allocated once and rewound without copying.

`KVStore` holds a model's keys and values, [layers, B, kv_heads, capacity, D] each, and a length;
what lies beyond the length is dead and will be overwritten, so rejecting tokens costs nothing.
`VerifierCache` shows a store to `transformers`, `draft_attention` to our draft.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache, CacheLayerMixin

from speculators_core.models.eagle3 import Attend


class KVStore:
    """Keys and values of one sequence for all layers of a model; `length` tokens are alive.

    Memory is taken when the first keys arrive: only they tell the heads, widths and dtype. A
    layer's rows beyond `length` may be written in a pass; `advance` makes them count.
    """

    def __init__(self, layers: int, capacity: int) -> None:
        self.layers = layers
        self.capacity = capacity
        self.length = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write [B, kv_heads, S, D] behind the living tokens; views of those and the new ones."""
        if not self._keys:
            self._allocate(keys, values)
        end = self.length + keys.shape[2]
        own_keys, own_values = self._keys[layer], self._values[layer]
        own_keys[:, :, self.length : end] = keys
        own_values[:, :, self.length : end] = values
        return own_keys[:, :, :end], own_values[:, :, :end]

    def advance(self, tokens: int) -> None:
        """Count `tokens` more as alive; negative drops the last ones."""
        self.length += tokens

    def _allocate(self, keys: Tensor, values: Tensor) -> None:
        for like, into in ((keys, self._keys), (values, self._values)):
            batch, heads, _, width = like.shape
            shape = (self.layers, batch, heads, self.capacity, width)
            into.extend(like.new_empty(shape).unbind(0))


class VerifierCache(Cache):  # type: ignore[misc]
    """A `transformers` cache over a store; whoever runs the model advances the store."""

    def __init__(self, store: KVStore) -> None:
        super().__init__(layers=[_Layer(store, i) for i in range(store.layers)])


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a `VerifierCache`. Sliding layers keep all tokens too: their mask hides them."""

    is_sliding = False

    def __init__(self, store: KVStore, layer: int) -> None:
        super().__init__()
        self.store = store
        self.layer = layer

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self.store.append(self.layer, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.store.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.store.length

    def get_max_length(self) -> int:
        return self.store.capacity

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The store allocates itself."""


def draft_attention(store: KVStore) -> Attend:
    """Causal attention over the store's living tokens and the new ones."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = store.append(layer, k, v)
        return grouped_attention(q, keys, values, causal_mask(q.shape[2], keys.shape[2], q.device))

    return attend


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor | None:
    """[queries, keys] bool for the last `queries` of `keys` tokens; None where all may be seen."""
    if queries == 1:
        return None
    ones = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return ones.tril(keys - queries)


def grouped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None = None
) -> Tensor:
    """Attention of q [B, heads, S, D] over k, v [B, kv_heads, L, D] without repeating them.

    The heads that share a kv head are laid along the query axis, where they cost no copy of the
    cache. `mask` is bool [S, L] or None.
    """
    batch, heads, length, width = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    folded = q.reshape(batch, kv_heads, group * length, width)
    rows = mask.repeat(group, 1) if mask is not None else None
    attended = scaled_dot_product_attention(folded, k, v, attn_mask=rows, scale=scale)
    return attended.reshape(batch, heads, length, v.shape[-1])
