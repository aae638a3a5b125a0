"""What a card says of a draft beside its verifier, by algorithm. Light: no torch."""

from __future__ import annotations

from typing import Any

from speculators_core.config import Eagle3Config
from speculators_core.conversion.plan import DraftConfig
from speculators_core.models.dflash_config import DFlashConfig
from speculators_core.models.eagle_config import EagleConfig
from speculators_core.models.mtp_config import MTPConfig

TITLES = {
    "eagle3": "EAGLE-3 draft",
    "dflash": "DFlash draft",
    "mtp": "MTP head",
    "eagle": "EAGLE head",
}
"""What a draft of each algorithm is called."""


def facts_of(config: DraftConfig) -> dict[str, Any]:
    """Names and values, in the order that they are shown."""
    if isinstance(config, Eagle3Config):
        norms = {
            "input_norm over all states": config.norm_before_fc,
            "fc_norm for each state": config.fc_norm,
            "normed state fed back": config.norm_output,
        }
        layers = config.transformer_layer_config
        return {
            "Layers": f"{layers.num_hidden_layers}, {layers.model_type}",
            "Aux states, after k layers": config.eagle_aux_hidden_state_layer_ids or "unknown",
            "Draft vocabulary": f"{config.draft_vocab_size} of {config.vocab_size}",
            "Residual": "normed" if config.norm_before_residual else "un-normed",
            "Norms": ", ".join(name for name, on in norms.items() if on) or "the usual",
            "Precision": config.dtype,
        }
    if isinstance(config, DFlashConfig):
        return {
            "Verifier states, after k layers": config.aux_hidden_state_layer_ids,
            "Block": f"{config.block_size} tokens, mask token {config.mask_token_id}",
            "Embedding and head": "the verifier's, not stored",
            "Precision": config.dtype,
        }
    if isinstance(config, MTPConfig):
        layer = config.transformer_layer_config
        experts = f", {layer.num_experts} experts" if layer.has_experts else ""
        return {
            "Layer": f"{layer.model_type}{experts}",
            "Embedding and head": "the verifier's, not stored",
            "Precision": config.dtype,
        }
    if isinstance(config, EagleConfig):
        return {"Layers": config.num_hidden_layers, "Precision": config.dtype}
    return {}
