"""The speculators-format `config.json` of an MTP head, typed.

An MTP head is one decoder layer of its verifier's own kind, fed with the next token's embedding
beside the verifier's last state. Verifiers with one: Qwen3-Next and Qwen3.5, and their MoE forms.
Field names and meaning are those of speculators 0.9.0. Light: no torch.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from speculators_core.config import DecoderConfig, SpeculatorConfig

SHARED = frozenset({"embed_tokens.weight", "lm_head.weight"})
"""Tensors that the head borrows from its verifier, and never stores."""
PREFIX = "mtp_layers.0."
GATED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


class MTPLayers(DecoderConfig):
    """The verifier's text config, whose last full-attention layer is the pattern of the head's."""

    model_type: Literal["qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"]
    intermediate_size: int | None = None
    layer_types: list[str] | None = None
    num_experts: int | None = None
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int | None = None
    decoder_sparse_step: int | None = None
    mlp_only_layers: list[int] | None = None

    @property
    def has_experts(self) -> bool:
        """Whether the head's MLP is a mixture of experts."""
        if self.model_type != "qwen3_next":
            return self.model_type == "qwen3_5_moe_text"
        at, step = self._pattern, self.decoder_sparse_step or 1
        dense = at in (self.mlp_only_layers or ()) or not self.num_experts
        return not dense and (at + 1) % step == 0

    @property
    def _pattern(self) -> int:
        kinds = self.layer_types or []
        return max((i for i, kind in enumerate(kinds) if kind == "full_attention"), default=0)

    @model_validator(mode="after")
    def _sized(self) -> MTPLayers:
        needed = ["intermediate_size"]
        if self.has_experts:
            needed = ["moe_intermediate_size", "shared_expert_intermediate_size", "num_experts"]
        for name in needed:
            if not getattr(self, name):
                raise ValueError(f"{name} is missing")
        return self


class MTPConfig(SpeculatorConfig):
    """`config.json` of an MTP speculator."""

    architectures: list[str] = Field(["MTPDraftModel"])
    speculators_model_type: Literal["mtp"] = "mtp"
    num_nextn_predict_layers: Literal[1] = 1
    transformer_layer_config: MTPLayers

    @property
    def draft_vocab_size(self) -> int:
        return self.vocab_size

    @property
    def verifier_hidden_size(self) -> int:
        return self.transformer_layer_config.hidden_size

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all tensors of such a head, `SHARED` ones included."""
        layers = self.transformer_layer_config
        hidden = layers.hidden_size
        inner: dict[str, tuple[int, ...]] = {
            "input_proj.weight": (hidden, 2 * hidden),
            **_attention_shapes(layers),
            **(_experts_shapes(layers) if layers.has_experts else _mlp_shapes(layers)),
        }
        for name in ("hidden", "token", "input", "post_attention", "final"):
            inner[f"{name}_layernorm.weight"] = (hidden,)
        shared = dict.fromkeys(sorted(SHARED), (self.vocab_size, hidden))
        return {**shared, **{f"{PREFIX}{name}": shape for name, shape in inner.items()}}


def _attention_shapes(layers: MTPLayers) -> dict[str, tuple[int, ...]]:
    hidden, head_dim = layers.hidden_size, layers.head_dim
    heads, kv_heads = (
        n * head_dim for n in (layers.num_attention_heads, layers.num_key_value_heads)
    )
    queries = 2 * heads if layers.model_type in GATED else heads  # the second half is a gate
    rows = {"q_proj": queries, "k_proj": kv_heads, "v_proj": kv_heads}
    shapes: dict[str, tuple[int, ...]] = {
        **{f"self_attn.{name}.weight": (n, hidden) for name, n in rows.items()},
        "self_attn.o_proj.weight": (hidden, heads),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
    }
    if layers.attention_bias:
        shapes |= {f"self_attn.{n}.bias": (r,) for n, r in {**rows, "o_proj": hidden}.items()}
    return shapes


def _mlp_shapes(layers: MTPLayers, inner: int | None = None) -> dict[str, tuple[int, ...]]:
    hidden = layers.hidden_size
    inner = inner or layers.intermediate_size or 0
    return {
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


def _experts_shapes(layers: MTPLayers) -> dict[str, tuple[int, ...]]:
    hidden, inner, experts = (
        layers.hidden_size,
        layers.moe_intermediate_size or 0,
        layers.num_experts or 0,
    )
    shared = _mlp_shapes(layers, layers.shared_expert_intermediate_size)
    return {
        "mlp.gate.weight": (experts, hidden),
        "mlp.experts.gate_up_proj": (experts, 2 * inner, hidden),
        "mlp.experts.down_proj": (experts, hidden, inner),
        "mlp.shared_expert_gate.weight": (1, hidden),
        **{name.replace("mlp.", "mlp.shared_expert."): shape for name, shape in shared.items()},
    }
