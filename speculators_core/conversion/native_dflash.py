"""DFlash drafts in speculators format, as `speculators convert --algorithm dflash` and its trainer
write them: checked, and written as vLLM 0.32 reads them.

Their config leaves out what is a default of their classes, so the sizes of layers are read off the
tensors where it is silent. A draft over the whole vocabulary stores neither embedding nor head, one
over a part of it has a head of its own and the map. Light: no torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from speculators_core.conversion import rows
from speculators_core.conversion.aux_layers import counted_after, read_ids
from speculators_core.conversion.dflash import (
    IDS,
    MIXED,
    OTHERWISE_SAID,
    check_pairing,
    dflash_config,
    put_block,
)
from speculators_core.conversion.header import TensorInfo
from speculators_core.conversion.naming import count_layers
from speculators_core.conversion.native import check_keys
from speculators_core.conversion.options import stated_drafted
from speculators_core.conversion.pairing import tokenizer_warnings, verifier_block
from speculators_core.conversion.plan import Doubt, Inspection, Plan, TensorRow
from speculators_core.conversion.rope import put_rope
from speculators_core.conversion.sizes import rows_of
from speculators_core.conversion.source import Source
from speculators_core.conversion.target import Fields
from speculators_core.errors import CheckpointError
from speculators_core.model_config import positive
from speculators_core.models.dflash_config import SHARED, SLIDING, DFlashConfig
from speculators_core.models.verifier_config import VerifierFacts
from speculators_core.params import ConvertParams

_KNOWN = DFlashConfig.model_fields.keys() | {"torch_dtype", "transformers_version", "auto_map"}
_SAID = (
    *("draft_vocab_size", "block_size", "target_hidden_size", "mask_token_id"),
    *("sliding_window_non_causal", "sample_from_anchor"),
)
_SILENT = {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768}  # of a Qwen3 config
_KEPT = ("verifier_norm.weight", "verifier_lm_head.weight")
_WHAT = "DFlash draft in speculators format"


class NativeDFlash:
    """See `plan.Layout`."""

    name = "speculators-dflash"

    def recognises(self, source: Source) -> bool:
        return source.config.get("speculators_model_type") == "dflash"

    def plan(self, source: Source, verifier: VerifierFacts | None, params: ConvertParams) -> Plan:
        check_keys(source, _KNOWN)
        fields = Fields()
        doubts, warnings = _put_layers(fields, source, verifier, params)
        warnings += _put_draft(fields, source, params)
        about, name_warnings = verifier_block(verifier, params, source)
        result = dflash_config(fields, about, source)
        if verifier:
            check_pairing(result, {}, verifier)
        if result.mixes_attention:
            warnings.append(MIXED)
        return Plan(
            Inspection(
                layout=self.name,
                tensors=_rows(result, source),
                config=fields.found,
                doubts=doubts,
                warnings=[
                    *warnings,
                    *tokenizer_warnings(source.directory, verifier),
                    *name_warnings,
                ],
            ),
            result,
        )


def _put_layers(
    fields: Fields, source: Source, verifier: VerifierFacts | None, params: ConvertParams
) -> tuple[list[Doubt], list[str]]:
    layers = source.config.get("transformer_layer_config") or {}
    layers = {name: value for name, value in layers.items() if value is not None}
    for name, value in layers.items():
        if name not in OTHERWISE_SAID:
            fields.put(name, value, "checkpoint")
    for name, value in _counted(source.tensors, source).items():
        if name not in layers:
            fields.put(name, value, "tensors")
    for name, value in _SILENT.items():
        if name not in layers:
            fields.put(name, value, "layout")
    if "vocab_size" not in layers:
        _put_vocabulary(fields, source, verifier)
    return put_rope(fields, layers, source, verifier, params)


def _counted(tensors: Mapping[str, TensorInfo], source: Source) -> dict[str, int]:
    """The sizes that the tensors tell; raises `CheckpointError` where one of them is missing."""

    def height(name: str) -> int:
        return rows_of(tensors, f"layers.0.{name}.weight", source, _WHAT)

    head_dim = height("self_attn.q_norm")
    return {
        "hidden_size": rows_of(tensors, "norm.weight", source, _WHAT),
        "num_hidden_layers": count_layers(dict(tensors)),
        "intermediate_size": height("mlp.gate_proj"),
        "head_dim": head_dim,
        "num_attention_heads": height("self_attn.q_proj") // head_dim,
        "num_key_value_heads": height("self_attn.k_proj") // head_dim,
    }


def _put_vocabulary(fields: Fields, source: Source, verifier: VerifierFacts | None) -> None:
    for name in ("t2d", "embed_tokens.weight"):
        if name in source.tensors:
            fields.put("vocab_size", rows_of(source.tensors, name, source), "tensors")
            return
    fields.put("vocab_size", verifier.vocab_size if verifier else None, "verifier")


def _put_draft(fields: Fields, source: Source, params: ConvertParams) -> list[str]:
    """What is said beside the layers."""
    for name in _SAID:
        if source.config.get(name) is not None:
            fields.put(name, source.config[name], "checkpoint")
    fields.put("block_size", positive(source.config, "block_size", source.directory), "checkpoint")
    _put_ids(fields, source, params)
    if source.config.get("draft_vocab_size") is None:
        fields.put("draft_vocab_size", fields.found["vocab_size"].value, "layout")
    put_block(fields, source, params, stated_drafted(source))
    kinds = fields.found["layer_types"].value if "layer_types" in fields.found else []
    if SLIDING not in kinds:  # means nothing to speculators then; vLLM takes false for causal
        fields.put("sliding_window_non_causal", True, "layout")
    elif "sliding_window_non_causal" not in fields.found:
        fields.put("sliding_window_non_causal", False, "layout")
    dtype, warnings = rows.precision(_weights(source), "fc.weight", source)
    fields.put("dtype", dtype, "tensors")
    return warnings


def _weights(source: Source) -> dict[str, TensorInfo]:
    """The draft's own tensors that have a precision."""
    return {n: i for n, i in source.tensors.items() if n not in ("d2t", "t2d", *_KEPT)}


def _put_ids(fields: Fields, source: Source, params: ConvertParams) -> None:
    """The states that `fc` takes. This format counts after k layers."""
    stated = read_ids(source.config, IDS, source)
    ids = params.aux_layers or stated
    if ids is None:
        raise CheckpointError(
            "the checkpoint does not say which verifier states its fc takes",
            where=f"{source.directory / 'config.json'}: {IDS}",
            hint="name the layers that the draft was trained on: --aux-layers",
        )
    told = params.aux_layers or params.aux_convention
    after = counted_after(ids, params.aux_convention or "after")
    fields.put(IDS, after, "parameter" if told else "checkpoint")


def _rows(config: DFlashConfig, source: Source) -> list[TensorRow]:
    """A row for each tensor; raises `CheckpointError` for one that is missing or has no place."""
    shapes, found = config.tensor_shapes(), []
    for target in sorted(shapes):
        found.append(_target_row(target, config, source))
    for name in sorted(source.tensors.keys() - shapes.keys()):
        info = source.tensors[name]
        if name in _KEPT:
            found.append(rows.unused(info, "the verifier's own, kept by a trainer"))
        elif name in ("d2t", "t2d"):
            found.append(rows.unused(info, "the draft vocabulary is the whole vocabulary"))
        elif name.endswith("rotary_emb.inv_freq"):
            found.append(rows.unused(info, "computed from rope_parameters"))
        else:
            why = "a DFlash draft of plain Qwen3 layers has no such tensor"
            raise rows.no_place(info, why, "leaving it out would change the draft")
    return found


def _target_row(target: str, config: DFlashConfig, source: Source) -> TensorRow:
    if target in source.tensors:
        return rows.copied(target, source.tensors[target], config)
    other = {"d2t": "t2d", "t2d": "d2t"}.get(target)
    if other in source.tensors:
        reason = f"derived from {other}: the two say the same"
        return rows.derived(target, source.tensors[other], config, reason)
    whole = config.draft_vocab_size == config.vocab_size
    if target in SHARED and (whole or target == "embed_tokens.weight"):
        return rows.shared(target, config, "the verifier's own is used when the draft is loaded")
    raise rows.missing(target, source, _WHAT)
