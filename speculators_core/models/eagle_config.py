"""The plain `config.json` of an EAGLE-1, EAGLE-2 or HASS head, typed, as vLLM 0.32 serves it.

vLLM's speculators format has no such type, so this one is a Llama config whose architecture is
`EagleLlamaForCausalLM`; it is served with method `eagle`. The head has no final norm and no
`lm_head`, and its first layer no input norm: the verifier's head reads its states as they are.
Light: no torch.
"""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from speculators_core.config import LayerConfig, WrittenConfig
from speculators_core.params import MOST_DRAFTED


class EagleConfig(WrittenConfig, LayerConfig):
    """`config.json` of an EAGLE head."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_type: Literal["llama"] = "llama"
    architectures: tuple[Literal["EagleLlamaForCausalLM"]] = ("EagleLlamaForCausalLM",)
    qkv_bias: bool = False  # vLLM takes attention_bias for o_proj alone where this one is given
    num_lookahead_tokens: int = Field(ge=1, le=MOST_DRAFTED)
    tie_word_embeddings: bool = False
    dtype: Literal["float32", "float16", "bfloat16"]

    @property
    def algorithm(self) -> str:
        return "eagle"

    @property
    def speculative_tokens(self) -> int:
        """The K that the file proposes; vLLM is told it again when it starts."""
        return self.num_lookahead_tokens

    @property
    def draft_vocab_size(self) -> int:
        return self.vocab_size

    @property
    def verifier_hidden_size(self) -> int:
        return self.hidden_size

    def tensor_dtype(self, name: str) -> str:
        """The dtype of one tensor of such a checkpoint, in torch's words."""
        return self.dtype

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all tensors of such a head, the embedding included."""
        shapes: dict[str, tuple[int, ...]] = {
            "embed_tokens.weight": (self.vocab_size, self.hidden_size),
            "fc.weight": (self.hidden_size, 2 * self.hidden_size),
        }
        for i in range(self.num_hidden_layers):
            shapes |= {f"layers.{i}.{name}": s for name, s in self._layer_shapes(i).items()}
        return shapes

    def _layer_shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        heads, kv_heads = (
            n * self.head_dim for n in (self.num_attention_heads, self.num_key_value_heads)
        )
        rows = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
        shapes: dict[str, tuple[int, ...]] = {
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.o_proj.weight": (hidden, heads),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
            **{f"self_attn.{name}.weight": (n, hidden) for name, n in rows.items()},
        }
        if index:
            shapes["input_layernorm.weight"] = (hidden,)
        if self.qkv_bias:
            shapes |= {f"self_attn.{name}.bias": (n,) for name, n in rows.items()}
        if self.attention_bias:
            shapes["self_attn.o_proj.bias"] = (hidden,)
        if self.mlp_bias:
            shapes |= {"mlp.gate_proj.bias": (inner,), "mlp.up_proj.bias": (inner,)}
            shapes["mlp.down_proj.bias"] = (hidden,)
        return shapes
