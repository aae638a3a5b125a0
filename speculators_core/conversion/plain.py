"""What the layouts that carry a plain Llama config have in common: research, SpecForge,
Model-Optimizer and AngelSlim. Their readers say what a file adds to it (`Said`).

The residual is un-normed and the state before the final norm is fed back (FORMATS 5.2), unless the
file or a person says otherwise. Light: no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from speculators_core.conversion.aux_layers import StatedIds, put_aux_layers
from speculators_core.conversion.header import TensorInfo
from speculators_core.conversion.naming import rename
from speculators_core.conversion.options import put_drafted
from speculators_core.conversion.pairing import check_pairing, pairing_warnings, verifier_block
from speculators_core.conversion.plan import Doubt, Inspection, Plan
from speculators_core.conversion.rope import put_rope
from speculators_core.conversion.sizes import (
    flat_config,
    origin_of,
    put_context,
    put_sizes,
    put_vocabulary,
    put_widths,
)
from speculators_core.conversion.source import Source
from speculators_core.conversion.target import Fields, tensor_of, tensor_rows
from speculators_core.models.verifier_config import VerifierFacts
from speculators_core.params import ConvertParams

_SILENT_EPS = 1e-6
_SLIDING = "sliding_attention"
_QWEN3_SEEING = 28  # transformers' default of max_window_layers
_SWITCH_TENSORS = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}
_NORM_OUTPUT_TAKEN = (
    "norm_output is set in the checkpoint and was taken as speculators means it (the normed state "
    "is fed back)"
)


@dataclass(frozen=True)
class Said:
    """What a layout's reader found beside the plain config. `norm_output` is the layout's word on
    the state that is fed back, None where the config's switch means what speculators means by it.
    """

    ids: StatedIds
    norm_output: bool | None = None
    doubts: list[Doubt] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def plan_plain(
    name: str, source: Source, verifier: VerifierFacts | None, params: ConvertParams, said: Said
) -> Plan:
    """The plan of a draft with a plain config. See `plan.Layout`."""
    config, named, fields = flat_config(source), rename(source), Fields()
    put_sizes(fields, config, source, named)
    put_context(fields, config, source, verifier)
    put_vocabulary(fields, config, source, named, verifier)
    doubts, warnings = put_rope(fields, config, source, verifier, params)
    warnings += _put_switches(fields, config, source, named, params, said)
    warnings += put_window(fields, config)
    num_aux = put_widths(fields, config, source, named, verifier)
    doubts += said.doubts + put_aux_layers(fields, said.ids, num_aux, verifier, params)
    put_drafted(fields, params)
    block, about_name = verifier_block(verifier, params, source)
    result = fields.config(source, block)
    if verifier:
        check_pairing(result, verifier)
    return Plan(
        Inspection(
            layout=name,
            tensors=tensor_rows(named, result, source, verifier),
            config=fields.found,
            doubts=doubts,
            warnings=[
                *said.warnings,
                *warnings,
                *pairing_warnings(config, source, verifier),
                *about_name,
            ],
        ),
        result,
    )


def put_norms(
    fields: Fields, config: Mapping[str, Any], source: Source, named: dict[str, TensorInfo]
) -> None:
    """`norm_before_fc` and `fc_norm`: on where their weights are there. A config that names a norm
    without weights is refused; weights that a config forgot are used (A10).
    """
    for switch, tensor in _SWITCH_TENSORS.items():
        if config.get(switch):
            tensor_of(named, tensor, source)
        fields.put(switch, tensor in named, "tensors")


def put_dtype(
    fields: Fields, config: Mapping[str, Any], source: Source, named: dict[str, TensorInfo]
) -> None:
    """The config's word, else the precision that the weights have."""
    stated = config.get("torch_dtype") or config.get("dtype")
    if stated is None:
        fields.put("dtype", tensor_of(named, "fc.weight", source).dtype, "tensors")
    else:
        fields.put("dtype", str(stated).removeprefix("torch."), "checkpoint")


def put_window(fields: Fields, config: Mapping[str, Any]) -> list[str]:
    """A draft that was trained to look back over a window only is served so."""
    layers = fields.found["num_hidden_layers"].value
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if kinds is None:
        kinds = _kinds_of(config, layers)
    if not window or _SLIDING not in kinds:
        return []
    values = {"sliding_window": window, "use_sliding_window": True, "layer_types": kinds}
    for name, value in values.items():
        fields.put(name, value, "checkpoint")
    return [
        f"the draft looks back over the last {window} tokens; the reference engine, unlike vLLM, "
        "lets it see all, so the two differ on longer contexts"
    ]


def _kinds_of(config: Mapping[str, Any], layers: int) -> list[str]:
    """The kinds of layers that a config without `layer_types` means. A Qwen3's first layers see
    all: as many as `max_window_layers` says."""
    if not config.get("use_sliding_window"):
        return []
    seeing = 0
    if config.get("model_type") == "qwen3":
        seeing = config.get("max_window_layers", _QWEN3_SEEING)
    return ["full_attention" if i < seeing else _SLIDING for i in range(layers)]


def _put_switches(
    fields: Fields,
    config: Mapping[str, Any],
    source: Source,
    named: dict[str, TensorInfo],
    params: ConvertParams,
    said: Said,
) -> list[str]:
    put_norms(fields, config, source, named)
    put_dtype(fields, config, source, named)
    residual = config.get("norm_before_residual")
    _put_switch(fields, "norm_before_residual", params.norm_before_residual, residual)
    fed_back = config.get("norm_output") if said.norm_output is None else said.norm_output
    _put_switch(fields, "norm_output", params.norm_output, fed_back)
    if said.norm_output is None and fed_back and params.norm_output is None:
        return [_NORM_OUTPUT_TAKEN]
    return []


def _put_switch(fields: Fields, name: str, given: bool | None, stated: bool | None) -> None:
    if given is not None:
        fields.put(name, given, "parameter")
    else:
        fields.put(name, bool(stated), origin_of(stated))
