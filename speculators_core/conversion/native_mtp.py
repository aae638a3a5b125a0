"""MTP heads in speculators format, as `speculators convert --algorithm mtp` and its trainer write
them: checked, and what their config leaves out filled in. Light: no torch.
"""

from __future__ import annotations

from speculators_core.conversion import rows
from speculators_core.conversion.mtp import OTHERWISE_SAID, SERVED, mtp_config
from speculators_core.conversion.native import check_keys
from speculators_core.conversion.options import put_drafted, stated_drafted
from speculators_core.conversion.pairing import check_sizes, verifier_block
from speculators_core.conversion.plan import Inspection, Plan, TensorRow
from speculators_core.conversion.sizes import rows_of
from speculators_core.conversion.source import Source
from speculators_core.conversion.target import Fields
from speculators_core.models.mtp_config import GATED, PREFIX, SHARED, MTPConfig
from speculators_core.models.verifier_config import VerifierFacts
from speculators_core.params import ConvertParams

_KNOWN = MTPConfig.model_fields.keys() | {"torch_dtype", "transformers_version", "auto_map"}
_NAN = "verifier_lm_head.weight"
_WHAT = "MTP head in speculators format"
_OF_VERIFIER = (
    *("vocab_size", "num_hidden_layers", "rms_norm_eps", "max_position_embeddings"),
    "rope_parameters",
)
"""What no tensor of the head tells, and its verifier does: both are one model."""


class NativeMTP:
    """See `plan.Layout`."""

    name = "speculators-mtp"

    def recognises(self, source: Source) -> bool:
        return source.config.get("speculators_model_type") == "mtp"

    def plan(self, source: Source, verifier: VerifierFacts | None, params: ConvertParams) -> Plan:
        check_keys(source, _KNOWN)
        fields = Fields()
        _put_layers(fields, source, verifier)
        put_drafted(fields, params, stated_drafted(source))
        head = {n: i for n, i in source.tensors.items() if n.startswith(PREFIX)}
        dtype, warnings = rows.precision(head, f"{PREFIX}input_proj.weight", source)
        fields.put("dtype", dtype, "tensors")
        about, name_warnings = verifier_block(verifier, params, source)
        config = mtp_config(fields, about, source)
        if verifier:
            layers = config.transformer_layer_config.num_hidden_layers
            check_sizes(config.vocab_size, config.verifier_hidden_size, layers, verifier)
        return Plan(
            Inspection(
                layout=self.name,
                tensors=_rows(config, source),
                config=fields.found,
                doubts=[],
                warnings=[*warnings, SERVED, *name_warnings],
            ),
            config,
        )


def _put_layers(fields: Fields, source: Source, verifier: VerifierFacts | None) -> None:
    """The config's word, else what the tensors tell, else the verifier's."""
    layers = source.config.get("transformer_layer_config") or {}
    layers = {name: value for name, value in layers.items() if value is not None}
    for name, value in layers.items():
        if name not in OTHERWISE_SAID:
            fields.put(name, value, "checkpoint")
    for name, value in _counted(source, str(layers.get("model_type"))).items():
        if name not in layers:
            fields.put(name, value, "tensors")
    given = layers.keys() | ({"rope_parameters"} if "rope_theta" in layers else set())
    for name in _OF_VERIFIER if verifier else ():
        if name not in given:
            fields.put(name, getattr(verifier, name), "verifier")


def _counted(source: Source, kind: str) -> dict[str, int]:
    """The sizes that the tensors tell; raises `CheckpointError` where one of them is missing."""

    def height(name: str) -> int:
        return rows_of(source.tensors, f"{PREFIX}{name}", source, _WHAT)

    head_dim = height("self_attn.q_norm.weight")
    queries = height("self_attn.q_proj.weight") // (2 if kind in GATED else 1)
    sizes = {
        "hidden_size": height("final_layernorm.weight"),
        "head_dim": head_dim,
        "num_attention_heads": queries // head_dim,
        "num_key_value_heads": height("self_attn.k_proj.weight") // head_dim,
    }
    if f"{PREFIX}mlp.experts.gate_up_proj" not in source.tensors:
        return sizes | {"intermediate_size": height("mlp.gate_proj.weight")}
    stacked = source.tensors[f"{PREFIX}mlp.experts.gate_up_proj"].shape
    return sizes | {
        "num_experts": height("mlp.experts.gate_up_proj"),
        "moe_intermediate_size": stacked[1] // 2 if len(stacked) == 3 else 0,
        "shared_expert_intermediate_size": height("mlp.shared_expert.gate_proj.weight"),
    }


def _rows(config: MTPConfig, source: Source) -> list[TensorRow]:
    """A row for each tensor; raises `CheckpointError` for one that is missing or has no place."""
    shapes, found = config.tensor_shapes(), []
    for target in sorted(shapes):
        if target in SHARED:
            reason = "the verifier's own is used when the head is loaded"
            found.append(rows.shared(target, config, reason))
        elif target in source.tensors:
            found.append(rows.copied(target, source.tensors[target], config))
        else:
            raise rows.missing(target, source, _WHAT)
    for name in sorted(source.tensors.keys() - (shapes.keys() - SHARED)):
        info = source.tensors[name]
        if name == _NAN:
            found.append(rows.unused(info, "speculators writes it, with nothing in it"))
        elif name in SHARED:
            found.append(rows.unused(info, "a copy of the verifier's own, which is used"))
        else:
            why = "an MTP head is one layer without such a tensor"
            raise rows.no_place(info, why, "leaving it out would change the head")
    return found
