"""What the layouts that carry a plain Llama config have in common: research, SpecForge,
Model-Optimizer and AngelSlim. Their readers say what a file adds to it (`Said`).

Sizes come from the config, checked against the tensors, and from the tensors where it is silent.
The residual is un-normed and the state before the final norm is fed back (FORMATS 5.2), unless the
file or a person says otherwise. Light: no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from speculators_core.config import USUAL_AUX
from speculators_core.conversion.aux_layers import StatedIds, put_aux_layers
from speculators_core.conversion.header import TensorInfo
from speculators_core.conversion.naming import count_layers, rename
from speculators_core.conversion.options import put_drafted
from speculators_core.conversion.pairing import check_pairing, pairing_warnings, verifier_block
from speculators_core.conversion.plan import Doubt, Inspection, Origin, Plan
from speculators_core.conversion.rope import put_rope
from speculators_core.conversion.source import Source
from speculators_core.conversion.target import Fields, tensor_of, tensor_rows
from speculators_core.errors import CheckpointError
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


def flat_config(source: Source) -> dict[str, Any]:
    """The config, a nested `text_config` (multimodal wrappers) brought to the top, nulls left
    out: an exporter's null says no more than silence.
    """
    inner = source.config.get("text_config")
    values = {**source.config, **inner} if isinstance(inner, dict) else source.config
    return {name: value for name, value in values.items() if value is not None}


def block_of(config: Mapping[str, Any], name: str, source: Source) -> dict[str, Any]:
    """A nested object of the config, empty where it is missing. Raises `CheckpointError` where it
    is anything else.
    """
    block = config.get(name)
    if block is not None and not isinstance(block, dict):
        raise CheckpointError(
            f"{name} should be an object, found {block!r}",
            where=f"{source.directory / 'config.json'}: {name}",
            hint="correct config.json, or ask where the checkpoint came from",
        )
    return dict(block or {})


def flag(config: Mapping[str, Any], name: str, source: Source) -> bool | None:
    """A switch of the config, None where it is silent."""
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(
            f"{name} should be true or false, found {value!r}",
            where=f"{source.directory / 'config.json'}: {name}",
            hint="correct config.json, or ask where the checkpoint came from",
        )
    return value


def put_sizes(
    fields: Fields, config: Mapping[str, Any], source: Source, named: dict[str, TensorInfo]
) -> None:
    """The layers' sizes: the config's word where it has one, else what the tensors show."""
    fields.put("num_hidden_layers", count_layers(named), "tensors")

    def size(name: str, tensor: str, divide: int = 1) -> int:
        rows = rows_of(named, tensor, source)
        if config.get(name) is not None:
            stated = positive(config, name, source)
            if stated * divide != rows:
                raise CheckpointError(
                    f"{name} is {stated}, so {tensor} should have {stated * divide} rows; "
                    f"it has {rows}",
                    where=f"{source.directory / 'config.json'}: {name}",
                    hint="config.json and tensors disagree: do they belong together?",
                )
            return int(fields.put(name, stated, "checkpoint"))
        if rows % divide:
            raise CheckpointError(
                f"{tensor} has {rows} rows, no multiple of {divide}",
                where=f"{source.directory}: {name}",
                hint=f"config.json lacks {name}, and the tensors can't tell it",
            )
        return int(fields.put(name, rows // divide, "tensors"))

    size("hidden_size", "norm.weight")
    size("intermediate_size", "layers.0.mlp.gate_proj.weight")
    heads = fields.put(
        "num_attention_heads", positive(config, "num_attention_heads", source), "checkpoint"
    )
    head_dim = size("head_dim", "layers.0.self_attn.q_proj.weight", heads)
    size("num_key_value_heads", "layers.0.self_attn.k_proj.weight", head_dim)
    for name, silent in (("rms_norm_eps", _SILENT_EPS), ("hidden_act", "silu")):
        stated = config.get(name)
        fields.put(name, silent if stated is None else stated, origin_of(stated))
    fields.put("attention_bias", "layers.0.self_attn.q_proj.bias" in named, "tensors")
    fields.put("mlp_bias", "layers.0.mlp.gate_proj.bias" in named, "tensors")


def put_context(
    fields: Fields, config: Mapping[str, Any], source: Source, verifier: VerifierFacts | None
) -> None:
    """The longer of the two: vLLM limits the served context by the draft's."""
    name = "max_position_embeddings"
    own = positive(config, name, source) if config.get(name) is not None else 0
    theirs = verifier.max_position_embeddings if verifier else 0
    fields.put(name, max(own, theirs, 1), "verifier" if theirs > own else "checkpoint")


def put_vocabulary(
    fields: Fields,
    config: Mapping[str, Any],
    source: Source,
    named: dict[str, TensorInfo],
    verifier: VerifierFacts | None,
) -> None:
    """dv is what `lm_head` has, V what `t2d` has, or the embedding, the config, the verifier."""
    rows = rows_of(named, "lm_head.weight", source)
    stated = config.get("draft_vocab_size")
    if stated is not None and stated != rows:
        raise CheckpointError(
            f"draft_vocab_size is {stated!r}, lm_head.weight has {rows} rows",
            where=f"{source.directory / 'config.json'}: draft_vocab_size",
            hint="config.json and tensors disagree: do they belong together?",
        )
    fields.put("draft_vocab_size", rows, "tensors")
    for tensor in ("t2d", "embed_tokens.weight"):
        if tensor in named:
            fields.put("vocab_size", rows_of(named, tensor, source), "tensors")
            return
    if config.get("vocab_size") is not None:
        fields.put("vocab_size", positive(config, "vocab_size", source), "checkpoint")
    else:
        fields.put("vocab_size", verifier.vocab_size if verifier else rows, "verifier")


def put_norms(
    fields: Fields, config: Mapping[str, Any], source: Source, named: dict[str, TensorInfo]
) -> None:
    """`norm_before_fc` and `fc_norm`: on where their weights are there. A config that names a norm
    without weights is refused; weights that a config forgot are used (A10).
    """
    for switch, tensor in _SWITCH_TENSORS.items():
        if flag(config, switch, source):
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
    if not isinstance(kinds, list):
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
    residual = flag(config, "norm_before_residual", source)
    _put_switch(fields, "norm_before_residual", params.norm_before_residual, residual)
    fed_back = flag(config, "norm_output", source) if said.norm_output is None else said.norm_output
    _put_switch(fields, "norm_output", params.norm_output, fed_back)
    if said.norm_output is None and fed_back and params.norm_output is None:
        return [_NORM_OUTPUT_TAKEN]
    return []


def _put_switch(fields: Fields, name: str, given: bool | None, stated: bool | None) -> None:
    if given is not None:
        fields.put(name, given, "parameter")
    else:
        fields.put(name, bool(stated), origin_of(stated))


def put_widths(
    fields: Fields,
    config: Mapping[str, Any],
    source: Source,
    named: dict[str, TensorInfo],
    verifier: VerifierFacts | None,
) -> int:
    """`target_hidden_size`, and how many aux states `fc` takes. Another number than 3 is written
    where vLLM 0.32 looks for it: it does not count the ids of a Llama draft.
    """
    stated = config.get("target_hidden_size")
    hidden = fields.found["hidden_size"].value
    if stated is None and verifier and verifier.hidden_size != hidden:
        stated = fields.put("target_hidden_size", verifier.hidden_size, "verifier")
    else:
        fields.put("target_hidden_size", stated, "checkpoint")
    wide = positive({"target_hidden_size": stated or hidden}, "target_hidden_size", source)
    fc = tensor_of(named, "fc.weight", source)
    if len(fc.shape) != 2 or fc.shape[1] % wide or not fc.shape[1]:
        raise CheckpointError(
            f"fc.weight is {list(fc.shape)}; its width should be a multiple of the verifier's "
            f"hidden size {wide}",
            where=f"{fc.file}: {fc.name}",
            hint="is this the verifier that the draft was trained for?",
        )
    num_aux = fc.shape[1] // wide
    if num_aux != USUAL_AUX:
        fields.put("num_aux_hidden_states", num_aux, "tensors")
    return num_aux


def rows_of(named: Mapping[str, TensorInfo], tensor: str, source: Source) -> int:
    """The rows of a tensor, at least one."""
    info = tensor_of(named, tensor, source)
    if not info.shape or not info.shape[0]:
        raise CheckpointError(
            f"tensor {info.name} has shape {list(info.shape)}, expected rows",
            where=f"{info.file}: {info.name}",
            hint="the checkpoint is damaged",
        )
    return info.shape[0]


def origin_of(stated: object) -> Origin:
    return "layout" if stated is None else "checkpoint"


def positive(config: Mapping[str, Any], name: str, source: Source) -> int:
    """A size of the config. Raises `CheckpointError` where it is no positive integer."""
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(
            f"{name} should be a positive integer, found {value!r}",
            where=f"{source.directory / 'config.json'}: {name}",
            hint="correct config.json, or ask where the checkpoint came from",
        )
    return value
