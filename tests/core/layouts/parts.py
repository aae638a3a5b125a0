"""What drafts of all kinds have in common: seeded tensors, and decoder layers like a Llama's.

Every norm weight differs from 1, so that a norm that is left out or applied twice shows.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

Weights = dict[str, Tensor]


class Sizes(Protocol):
    """Of one decoder layer."""

    @property
    def hidden(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def inner(self) -> int: ...


class Drawing:
    """Random tensors, one after the other: equal seeds give equal ones."""

    def __init__(self, seed: int, dtype: str) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self._dtype = getattr(torch, dtype)

    def __call__(self, *shape: int) -> Tensor:
        values = torch.randn(*shape, generator=self.generator)
        values = 1 + 0.3 * values if len(shape) == 1 else 0.2 * values
        return values.to(self._dtype)


def decoder_layer(
    draw: Drawing,
    sizes: Sizes,
    *,
    wide: int | None = None,
    biased: bool = False,
    gated: bool = False,
) -> Weights:
    """Attention, MLP and the norm between them. `wide`: what queries, keys and values see, where
    that is not the hidden state; `gated`: every query has a gate beside it.
    """
    hidden, heads = sizes.hidden, sizes.heads * sizes.head_dim
    kv_heads = sizes.kv_heads * sizes.head_dim
    rows = {"q": 2 * heads if gated else heads, "k": kv_heads, "v": kv_heads, "o": hidden}
    layer = {"post_attention_layernorm.weight": draw(hidden)}
    for name, height in rows.items():
        width = heads if name == "o" else wide or hidden
        layer[f"self_attn.{name}_proj.weight"] = draw(height, width)
        if biased:
            layer[f"self_attn.{name}_proj.bias"] = draw(height)
    for name in ("gate_proj", "up_proj"):
        layer[f"mlp.{name}.weight"] = draw(sizes.inner, hidden)
    layer["mlp.down_proj.weight"] = draw(hidden, sizes.inner)
    return layer


def layer_config(sizes: Sizes) -> dict[str, Any]:
    """The sizes as a Hugging Face config names them."""
    return {
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
    }
