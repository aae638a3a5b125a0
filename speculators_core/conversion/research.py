"""The research layout of EAGLE-3 (SafeAILab/EAGLE and who writes like it).

A plain Llama config, one `midlayer`, usually no embedding and never the aux layers (FORMATS 4.2).
The residual is un-normed and the state before the final norm is fed back, unless the file says
otherwise.
"""

from __future__ import annotations

import re
from typing import Any

from speculators_core.config import rope_parameters
from speculators_core.conversion.plan import Choice, Doubt, Inspection, Plan
from speculators_core.conversion.source import Source, TensorInfo
from speculators_core.conversion.target import (
    Fields,
    check_pairing,
    pairing_warnings,
    put_aux_layers,
    tensor_of,
    tensor_rows,
    verifier_block,
)
from speculators_core.errors import CheckpointError
from speculators_core.models.verifier_config import VerifierFacts
from speculators_core.params import ConvertParams

_LAYER = re.compile(r"(?P<prefix>(model\.)?(midlayer|layers))\.(?P<rest>.+)")
_SILENT_ROPE = 10000.0  # what a Llama config means when it names no base
_SILENT_EPS = 1e-6
_SWITCH_TENSORS = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}
_IDS = "eagle_aux_hidden_state_layer_ids"


class Research:
    """See `plan.Layout`."""

    name = "eagle3-research"

    def recognises(self, source: Source) -> bool:
        if "speculators_model_type" in source.config:
            return False
        if set(source.config.get("eagle_config") or {}) - {_IDS, "use_aux_hidden_state"}:
            return False  # Model-Optimizer: other switches, other meanings
        names = [name.removeprefix("model.") for name in source.tensors]
        first = ("midlayer.", "layers.0.")
        return "fc.weight" in names and any(
            name.startswith(first) and name.endswith("hidden_norm.weight") for name in names
        )

    def plan(self, source: Source, verifier: VerifierFacts | None, params: ConvertParams) -> Plan:
        named = rename(source)
        fields = Fields()
        _put_sizes(fields, source, named, verifier)
        doubts = _put_rope(fields, source.config, verifier)
        warnings = _put_switches(fields, source, named, params)
        num_aux = _put_widths(fields, source, named, verifier)
        stated = (source.config.get("eagle_config") or source.config).get(_IDS)
        doubts += put_aux_layers(fields, stated, None, num_aux, verifier, params)
        fields.put("speculative_tokens", params.speculative_tokens, "parameter")
        config = fields.config(source, verifier_block(verifier))
        if verifier:
            check_pairing(config, verifier)
        inspection = Inspection(
            layout=self.name,
            tensors=tensor_rows(named, config, source, verifier),
            config=fields.found,
            doubts=doubts,
            warnings=warnings + pairing_warnings(config, source, verifier),
        )
        return Plan(inspection, config)


def rename(source: Source) -> dict[str, TensorInfo]:
    """Tensors under their target names. One way of naming layers a file: mixtures are refused."""
    prefixes: dict[str, str] = {}
    named: dict[str, TensorInfo] = {}
    for name, info in source.tensors.items():
        target = name.removeprefix("model.")
        match = _LAYER.fullmatch(name)
        if match:
            prefixes.setdefault(match["prefix"], name)
            if match["prefix"].endswith("midlayer"):
                target = f"layers.0.{match['rest']}"
        if target in named:
            raise _mixture(source, named[target].name, name)
        named[target] = info
    if len(prefixes) > 1:
        raise _mixture(source, *list(prefixes.values())[:2])
    return named


def _mixture(source: Source, one: str, other: str) -> CheckpointError:
    return CheckpointError(
        f"the file mixes two ways of naming: {one} and {other}",
        where=str(source.directory),
        hint="was it merged from two checkpoints?",
    )


def _put_sizes(
    fields: Fields, source: Source, named: dict[str, TensorInfo], verifier: VerifierFacts | None
) -> None:
    """The layers' sizes: the config's word where it has one, else what the tensors show."""
    config = source.config
    layers = {n.split(".")[1] for n in named if n.startswith("layers.")}
    fields.put("num_hidden_layers", len(layers), "tensors")  # published configs can't be trusted

    def size(name: str, tensor: str, divide: int = 1) -> int:
        rows = tensor_of(named, tensor, source).shape[0]
        if config.get(name) is not None:
            stated = _positive(config, name, source)
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
        "num_attention_heads", _positive(config, "num_attention_heads", source), "checkpoint"
    )
    head_dim = size("head_dim", "layers.0.self_attn.q_proj.weight", heads)
    size("num_key_value_heads", "layers.0.self_attn.k_proj.weight", head_dim)
    for name, silent in (("rms_norm_eps", _SILENT_EPS), ("hidden_act", "silu")):
        stated = config.get(name)
        fields.put(name, silent if stated is None else stated, _origin(stated))
    _put_context(fields, source, verifier)
    _put_vocabulary(fields, source, named, verifier)


def _put_context(fields: Fields, source: Source, verifier: VerifierFacts | None) -> None:
    """The longer of the two: vLLM limits the served context by the draft's."""
    name = "max_position_embeddings"
    own = _positive(source.config, name, source) if source.config.get(name) is not None else 0
    theirs = verifier.max_position_embeddings if verifier else 0
    fields.put(name, max(own, theirs, 1), "verifier" if theirs > own else "checkpoint")


def _put_vocabulary(
    fields: Fields, source: Source, named: dict[str, TensorInfo], verifier: VerifierFacts | None
) -> None:
    config = source.config
    rows = tensor_of(named, "lm_head.weight", source).shape[0]
    stated = config.get("draft_vocab_size")
    if stated is not None and stated != rows:
        raise CheckpointError(
            f"draft_vocab_size is {stated!r}, lm_head.weight has {rows} rows",
            where=f"{source.directory / 'config.json'}: draft_vocab_size",
            hint="config.json and tensors disagree: do they belong together?",
        )
    fields.put("draft_vocab_size", rows, "tensors")
    if "t2d" in named:
        fields.put("vocab_size", named["t2d"].shape[0], "tensors")
    elif config.get("vocab_size") is not None:
        fields.put("vocab_size", _positive(config, "vocab_size", source), "checkpoint")
    else:
        fields.put("vocab_size", verifier.vocab_size if verifier else rows, "verifier")


def _put_rope(
    fields: Fields, config: dict[str, Any], verifier: VerifierFacts | None
) -> list[Doubt]:
    """A file that names no base takes the verifier's: a draft is trained on its positions."""
    stated = rope_parameters(config)
    if stated:
        fields.put("rope_parameters", stated, "checkpoint")
        return []
    silent: dict[str, Any] = {"rope_theta": _SILENT_ROPE, "rope_type": "default"}
    theirs = verifier.rope_parameters if verifier else silent
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict):
        theirs = rope_parameters({**config, "rope_theta": theirs["rope_theta"]}) or theirs
    fields.put("rope_parameters", theirs, "verifier")
    if theirs["rope_theta"] == _SILENT_ROPE:
        return []
    choices = [
        Choice(params={}, meaning=f"the verifier's: {theirs['rope_theta']:g}"),
        Choice(params={}, meaning=f"what a Llama config means by silence: {_SILENT_ROPE:g}"),
    ]
    return [Doubt(about="rope_theta is not in the checkpoint", choices=choices, chosen=0)]


def _put_switches(
    fields: Fields, source: Source, named: dict[str, TensorInfo], params: ConvertParams
) -> list[str]:
    config = source.config
    stated = config.get("norm_before_residual")
    if params.norm_before_residual is not None:
        fields.put("norm_before_residual", params.norm_before_residual, "parameter")
    else:
        fields.put("norm_before_residual", bool(stated), _origin(stated))
    for switch, tensor in _SWITCH_TENSORS.items():
        if config.get(switch):
            tensor_of(named, tensor, source)
        fields.put(switch, tensor in named, "tensors")
    fields.put("attention_bias", "layers.0.self_attn.q_proj.bias" in named, "tensors")
    fields.put("mlp_bias", "layers.0.mlp.gate_proj.bias" in named, "tensors")
    fields.put("norm_output", bool(config.get("norm_output")), _origin(config.get("norm_output")))
    dtype = config.get("torch_dtype") or config.get("dtype")
    name = str(dtype or "float32").removeprefix("torch.")
    fields.put("dtype", name, _origin(dtype))
    if config.get("norm_output"):
        return [
            "norm_output is set in the checkpoint and was taken as speculators means it (the "
            "normed state is fed back); SpecForge's switch of this name means something else"
        ]
    return []


def _put_widths(
    fields: Fields, source: Source, named: dict[str, TensorInfo], verifier: VerifierFacts | None
) -> int:
    """`target_hidden_size`, and how many aux states `fc` takes."""
    stated = source.config.get("target_hidden_size")
    hidden = fields.found["hidden_size"].value
    if stated is None and verifier and verifier.hidden_size != hidden:
        stated = fields.put("target_hidden_size", verifier.hidden_size, "verifier")
    else:
        fields.put("target_hidden_size", stated, "checkpoint")
    wide = _positive({"target_hidden_size": stated or hidden}, "target_hidden_size", source)
    fc = tensor_of(named, "fc.weight", source)
    if len(fc.shape) != 2 or fc.shape[1] % wide:
        raise CheckpointError(
            f"fc.weight is {list(fc.shape)}; its width should be a multiple of the verifier's "
            f"hidden size {wide}",
            where=f"{fc.file}: {fc.name}",
            hint="is this the verifier that the draft was trained for?",
        )
    return fc.shape[1] // wide


def _origin(stated: object) -> Any:
    return "layout" if stated is None else "checkpoint"


def _positive(config: dict[str, Any], name: str, source: Source) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(
            f"{name} should be a positive integer, found {value!r}",
            where=f"{source.directory / 'config.json'}: {name}",
            hint="correct config.json, or ask where the checkpoint came from",
        )
    return value
