"""The layouts that a speculator is exported to, and what their `config.json` says.

Light: no torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from speculators_core.config import Eagle3Config
from speculators_core.conversion.aux_layers import IDS
from speculators_core.errors import CheckpointError

_FIRST = "layers.0."
BIASES = ("attention_bias", "mlp_bias")
SWITCHES = {
    "norm_before_residual": "the residual carries the normed state",
    "norm_before_fc": "one norm over the concatenated states",
    "fc_norm": "a norm for each concatenated state",
    "norm_output": "the normed state is fed back",
}


class EagleBlock(BaseModel):
    """SpecForge's `eagle_config`: 0-based ids of the layers whose output is taken."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    eagle_aux_hidden_state_layer_ids: list[int]


class LayoutConfig(BaseModel):
    """`config.json` of both layouts, strict: a Llama config in the words of transformers 4, which
    these tools read. None stands for a field that is left out; no null is ever written.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    architectures: list[str]
    model_type: Literal["llama"] = "llama"
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: Literal[False] = False
    torch_dtype: str
    target_hidden_size: int | None = None
    eagle_config: EagleBlock | None = None
    norm_before_residual: bool | None = Field(None, description="not the layout's own: see Loss")
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    sliding_window: int | None = None
    layer_types: list[str] | None = None

    def to_json(self) -> str:
        """The text of config.json, read back as strictly as it was made."""
        text = json.dumps(self.model_dump(exclude_none=True), indent=2) + "\n"
        if LayoutConfig.model_validate_json(text) != self or "null" in text:
            raise CheckpointError("the config can't be written without loss", where="config.json")
        return text


@dataclass(frozen=True)
class ExportLayout:
    name: str
    architecture: str
    readers: str
    switches: frozenset[str]
    """Those that its readers know, by the tensors that go with them."""


LAYOUTS = {
    "research": ExportLayout("research", "LlamaForCausalLM", "SafeAILab/EAGLE", frozenset()),
    "specforge": ExportLayout(
        "specforge", "LlamaForCausalLMEagle3", "SpecForge and SGLang", frozenset({"fc_norm"})
    ),
}


def layout_config(config: Eagle3Config, layout: ExportLayout) -> LayoutConfig:
    """The config of a draft in the layout's words."""
    layer = config.transformer_layer_config
    rope = dict(layer.rope_parameters)
    theta = rope.pop("rope_theta")
    ids = config.eagle_aux_hidden_state_layer_ids
    held = layout.name == "specforge" and ids is not None
    block = EagleBlock(**{IDS: [k - 1 for k in ids or ()]}) if held else None
    switches: dict[str, Any] = {name: getattr(config, name) or None for name in SWITCHES}
    switches |= {name: getattr(layer, name) or None for name in BIASES}
    return LayoutConfig(
        architectures=[layout.architecture],
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size,
        num_hidden_layers=layer.num_hidden_layers,
        num_attention_heads=layer.num_attention_heads,
        num_key_value_heads=layer.num_key_value_heads,
        head_dim=layer.head_dim,
        rms_norm_eps=layer.rms_norm_eps,
        hidden_act=layer.hidden_act,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        max_position_embeddings=layer.max_position_embeddings,
        rope_theta=float(theta),
        rope_scaling=None if rope.get("rope_type", "default") == "default" else rope,
        torch_dtype=config.dtype,
        target_hidden_size=config.target_hidden_size,
        eagle_config=block,
        **switches,
        **window_of(config),
    )


def window_of(config: Eagle3Config) -> dict[str, Any]:
    """The keys of a window of attention, where one is in use."""
    extra = config.transformer_layer_config.model_extra or {}
    keys = {name: extra.get(name) for name in ("sliding_window", "layer_types")}
    return keys if "sliding_attention" in (keys["layer_types"] or ()) else {}


def layout_name(name: str) -> str:
    """What the layouts call a tensor of the speculators format."""
    return f"midlayer.{name.removeprefix(_FIRST)}" if name.startswith(_FIRST) else name
