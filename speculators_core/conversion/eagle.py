"""EAGLE-1, EAGLE-2 and HASS heads: `fc` over the next token's embedding and the verifier's last
state, then Llama layers, without a vocabulary map.

They become the plain layout that vLLM 0.32 serves with method `eagle`; its `EagleLlamaForCausalLM`
has no place for a bias of `fc`, for a first layer's input norm or for a head of its own, so files
with one are refused. Light: no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculators_core.conversion import rows
from speculators_core.conversion.header import TensorInfo
from speculators_core.conversion.naming import count_layers, rename
from speculators_core.conversion.options import put_drafted
from speculators_core.conversion.pairing import check_sizes, tokenizer_warnings
from speculators_core.conversion.plan import Inspection, Origin, Plan, TensorRow
from speculators_core.conversion.rope import put_rope
from speculators_core.conversion.sizes import flat_config, origin_of, put_context
from speculators_core.conversion.source import Source
from speculators_core.conversion.target import Fields
from speculators_core.model_config import positive
from speculators_core.models.eagle_config import EagleConfig
from speculators_core.models.verifier_config import VerifierFacts
from speculators_core.params import ConvertParams

_EMBEDDING = "embed_tokens.weight"
_BIASES = {
    "qkv_bias": "self_attn.q_proj.bias",
    "attention_bias": "self_attn.o_proj.bias",
    "mlp_bias": "mlp.gate_proj.bias",
}
_SILENT_EPS = 1e-6
_HINT = "leaving it out would change the head; vLLM 0.32 can't serve this variant"


class Eagle:
    """See `plan.Layout`. Asked last: it is known by what it lacks."""

    name = "eagle"

    def recognises(self, source: Source) -> bool:
        names = {name.removeprefix("model.") for name in source.tensors}
        if "speculators_model_type" in source.config or names & {"d2t", "t2d"}:
            return False
        fc = source.tensors.get("fc.weight") or source.tensors.get("model.fc.weight")
        twice = fc is not None and len(fc.shape) == 2 and fc.shape[1] == 2 * fc.shape[0]
        layer = any(name.startswith("layers.0.self_attn.") for name in names)
        return twice and layer and not any("hidden_norm" in name for name in names)

    def plan(self, source: Source, verifier: VerifierFacts | None, params: ConvertParams) -> Plan:
        config, named, fields = flat_config(source), rename(source), Fields()
        _put_sizes(fields, config, source, named, verifier)
        put_context(fields, config, source, verifier)
        doubts, warnings = put_rope(fields, config, source, verifier, params)
        dtype, mixed = rows.precision(named, "fc.weight", source)
        fields.put("dtype", dtype, "tensors")
        put_drafted(fields, params)
        result = EagleConfig.parse(
            _values(fields),
            where=str(source.directory / "config.json"),
        )
        if verifier:
            check_sizes(result.vocab_size, result.hidden_size, None, verifier)
        inspection = Inspection(
            layout=self.name,
            tensors=_rows(result, named, source),
            config=fields.found,
            doubts=doubts,
            warnings=[*warnings, *mixed, *tokenizer_warnings(source.directory, verifier)],
        )
        return Plan(inspection, result)


def _values(fields: Fields) -> dict[str, Any]:
    """Of config.json, which calls K by a name of its own."""
    values = {name: field.value for name, field in fields.found.items()}
    values["num_lookahead_tokens"] = values.pop("speculative_tokens")
    return values


def _put_sizes(
    fields: Fields,
    config: Mapping[str, Any],
    source: Source,
    named: Mapping[str, TensorInfo],
    verifier: VerifierFacts | None,
) -> None:
    """Sizes of the config, checked by the rows later; the tensors' word where it is silent.

    `bias` is left out: it tells of `fc` alone, and vLLM would take it for one of attention.
    """
    hidden = fields.put("hidden_size", named["fc.weight"].shape[0], "tensors")
    fields.put("num_hidden_layers", count_layers(dict(named)), "tensors")
    heads = positive(config, "num_attention_heads", source.directory)
    fields.put("num_attention_heads", heads, "checkpoint")
    stated = config.get("head_dim")
    head_dim = fields.put("head_dim", stated or hidden // heads, origin_of(stated))
    stated = config.get("num_key_value_heads")
    k_rows = named.get("layers.0.self_attn.k_proj.weight")
    counted = k_rows.shape[0] // head_dim if k_rows and k_rows.shape and head_dim else heads
    kv_origin: Origin = "tensors" if stated is None else "checkpoint"
    fields.put("num_key_value_heads", stated or counted, kv_origin)
    inner = positive(config, "intermediate_size", source.directory)
    fields.put("intermediate_size", inner, "checkpoint")
    for name, silent in (("rms_norm_eps", _SILENT_EPS), ("hidden_act", "silu")):
        fields.put(name, config.get(name, silent), origin_of(config.get(name)))
    for switch, tensor in _BIASES.items():
        fields.put(switch, f"layers.0.{tensor}" in named, "tensors")
    _put_vocabulary(fields, config, source, named, verifier)


def _put_vocabulary(
    fields: Fields,
    config: Mapping[str, Any],
    source: Source,
    named: Mapping[str, TensorInfo],
    verifier: VerifierFacts | None,
) -> None:
    if _EMBEDDING in named and named[_EMBEDDING].shape:
        fields.put("vocab_size", named[_EMBEDDING].shape[0], "tensors")
    elif config.get("vocab_size") is None and verifier:
        fields.put("vocab_size", verifier.vocab_size, "verifier")
    else:
        fields.put("vocab_size", positive(config, "vocab_size", source.directory), "checkpoint")


def _rows(config: EagleConfig, named: Mapping[str, TensorInfo], source: Source) -> list[TensorRow]:
    """A row for each tensor; raises `CheckpointError` for one that is missing or has no place."""
    shapes, found = config.tensor_shapes(), []
    for target in sorted(shapes):
        if target in named:
            found.append(rows.copied(target, named[target], config))
        elif target == _EMBEDDING:
            reason = "not in the file: the verifier's table is used when the head is loaded"
            found.append(rows.shared(target, config, reason))
        else:
            raise rows.missing(target, source, "EAGLE head of Llama layers")
    for target in sorted(named.keys() - shapes.keys()):
        info = named[target]
        if not target.endswith("rotary_emb.inv_freq"):
            raise rows.no_place(info, _why(target), _HINT)
        found.append(rows.unused(info, "computed from rope_parameters"))
    return found


def _why(target: str) -> str:
    reasons = {
        "fc.bias": "vLLM's fc has no bias",
        "layers.0.input_layernorm.weight": "vLLM's first layer takes fc's output as it is",
        "lm_head.weight": "vLLM lends the head its verifier's lm_head",
        "norm.weight": "vLLM hands the last layer's output to the verifier's head as it is",
    }
    return reasons.get(target, "vLLM's EAGLE head of Llama layers has no such tensor")
