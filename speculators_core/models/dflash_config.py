"""The speculators-format `config.json` of a DFlash draft, typed (arXiv 2602.06036).

A DFlash draft fills a block of masked tokens at once: its layers attend to the block and to states
of the verifier, which `fc` and `hidden_norm` bring to the draft's width. Field names and meaning
are those of speculators 0.9.0. Light: no torch.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from speculators_core.config import DecoderConfig, SpeculatorConfig

SLIDING = "sliding_attention"
SHARED = frozenset({"embed_tokens.weight", "lm_head.weight"})
"""Tensors that a draft over the whole vocabulary borrows from its verifier, and never stores."""


class DFlashLayers(DecoderConfig):
    """The draft's layers: Qwen3's, whose heads are normed, whatever their `model_type` says."""

    model_type: str = "qwen3"
    intermediate_size: int = Field(ge=1)
    layer_types: list[str] | None = None
    sliding_window: int | None = None


class DFlashConfig(SpeculatorConfig):
    """`config.json` of a DFlash speculator."""

    architectures: list[str] = Field(["DFlashDraftModel"])
    speculators_model_type: Literal["dflash"] = "dflash"
    draft_vocab_size: int = Field(ge=1)
    block_size: int = Field(ge=2)
    target_hidden_size: int | None = None
    aux_hidden_state_layer_ids: list[int] = Field(min_length=1)
    mask_token_id: int = Field(ge=0)
    sliding_window_non_causal: bool
    sample_from_anchor: bool = False
    transformer_layer_config: DFlashLayers

    @model_validator(mode="after")
    def _consistent(self) -> DFlashConfig:
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} is larger than "
                f"the verifier's vocab_size {self.vocab_size}"
            )
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}"
            )
        ids = self.aux_hidden_state_layer_ids
        if sorted(set(ids)) != ids or ids[0] < 0:
            raise ValueError(f"aux layer ids {ids} must be ascending, distinct and at least 0")
        return self

    @property
    def verifier_hidden_size(self) -> int:
        """H, the width of one verifier state."""
        return self.target_hidden_size or self.transformer_layer_config.hidden_size

    @property
    def mixes_attention(self) -> bool:
        """Whether some layers look back over a window and others over everything."""
        kinds = self.transformer_layer_config.layer_types or []
        return 0 < kinds.count(SLIDING) < len(kinds)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all tensors of such a draft, `SHARED` ones included."""
        layers = self.transformer_layer_config
        hidden = layers.hidden_size
        width = len(self.aux_hidden_state_layer_ids) * self.verifier_hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "embed_tokens.weight": (self.vocab_size, hidden),
            "lm_head.weight": (self.draft_vocab_size, hidden),
            "fc.weight": (hidden, width),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        if self.draft_vocab_size != self.vocab_size:
            shapes |= {"d2t": (self.draft_vocab_size,), "t2d": (self.vocab_size,)}
        for i in range(layers.num_hidden_layers):
            shapes |= {f"layers.{i}.{name}": shape for name, shape in _layer_shapes(layers).items()}
        return shapes


def _layer_shapes(layers: DFlashLayers) -> dict[str, tuple[int, ...]]:
    hidden, inner, head_dim = layers.hidden_size, layers.intermediate_size, layers.head_dim
    heads, kv_heads = (
        n * head_dim for n in (layers.num_attention_heads, layers.num_key_value_heads)
    )
    rows = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.o_proj.weight": (hidden, heads),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    shapes |= {f"self_attn.{name}.weight": (n, hidden) for name, n in rows.items()}
    if layers.attention_bias:
        shapes |= {f"self_attn.{n}.bias": (r,) for n, r in {**rows, "o_proj": hidden}.items()}
    return shapes
