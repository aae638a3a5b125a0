"""The speculators format itself as a source, of any version from 0.1.0.dev14 to 0.9.

Checked, its open questions settled, and written as 0.9.0 writes it. Worth converting where the aux
layers or `norm_before_residual` were left out (readers disagree on what silence means: vLLM 0.32
and speculators 0.9 differ on both), and where Model-Optimizer's `convert_to_vllm_ckpt` made the
file. What the versions say differently: docs/conversion.md. Light: no torch.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from speculators_core.config import LAYER_TYPES
from speculators_core.conversion.aux_layers import IDS, StatedIds, put_aux_layers, read_ids
from speculators_core.conversion.header import TensorInfo
from speculators_core.conversion.naming import rename
from speculators_core.conversion.options import put_drafted, stated_drafted
from speculators_core.conversion.pairing import check_pairing, pairing_warnings, verifier_block
from speculators_core.conversion.plain import (
    put_dtype,
    put_norms,
    put_window,
)
from speculators_core.conversion.plan import Choice, Doubt, Inspection, Plan
from speculators_core.conversion.rope import put_rope
from speculators_core.conversion.sizes import put_context, put_sizes, put_vocabulary, put_widths
from speculators_core.conversion.source import Source
from speculators_core.conversion.target import Fields, tensor_rows
from speculators_core.errors import CheckpointError
from speculators_core.models.verifier_config import VerifierFacts
from speculators_core.params import ConvertParams

_RESIDUAL = "norm_before_residual"
_DEV14 = "0.1.0.dev14"
_KNOWN = frozenset(
    {
        *("architectures", "speculators_model_type", "speculators_version", "speculators_config"),
        *("transformer_layer_config", "draft_vocab_size", "target_hidden_size", "dtype"),
        *(_RESIDUAL, "norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad", IDS),
        *("tie_word_embeddings", "torch_dtype", "transformers_version", "auto_map"),
        "has_no_defaults_at_init",  # a class variable that dev14 saved by mistake
    }
)
_RESIDUAL_MEANINGS = {
    False: "the residual carries the un-normed state: as speculators reads silence",
    True: "the residual carries the normed state: as vLLM reads silence",
}
_MADE_MEANINGS = {
    False: "un-normed, as Model-Optimizer trains and exports",
    True: "normed, as its convert_to_vllm_ckpt writes into every file",
}


class Native:
    """See `plan.Layout`."""

    name = "speculators"

    def recognises(self, source: Source) -> bool:
        return source.config.get("speculators_model_type") == "eagle3"

    def plan(self, source: Source, verifier: VerifierFacts | None, params: ConvertParams) -> Plan:
        check_keys(source, _KNOWN)
        named, fields = rename(source), Fields()
        config, layer = source.config, _layer_config(source)
        _put_layer_type(fields, layer, source, named)
        put_sizes(fields, layer, source, named)
        put_context(fields, layer, source, verifier)
        put_vocabulary(fields, {**layer, **_sizes(config)}, source, named, verifier)
        doubts, warnings = put_rope(fields, layer, source, verifier, params)
        doubts += _put_residual(fields, source, params)
        put_norms(fields, config, source, named)
        put_dtype(fields, config, source, named)
        _put_rest(fields, config, source, params)
        warnings += put_window(fields, layer)
        num_aux = put_widths(fields, config, source, named, verifier)
        ids = StatedIds(read_ids(config, IDS, source), "after", "speculators")
        doubts += put_aux_layers(fields, ids, num_aux, verifier, params)
        block, about_name = verifier_block(verifier, params, source)
        result = fields.config(source, block)
        if verifier:
            check_pairing(result, verifier)
        warnings += pairing_warnings(layer, source, verifier) + about_name
        warnings += [result.vllm_obstacle] if result.vllm_obstacle else []
        return Plan(
            Inspection(
                layout=self.name,
                tensors=tensor_rows(named, result, source, verifier),
                config=fields.found,
                doubts=doubts,
                warnings=warnings,
            ),
            result,
        )


def check_keys(source: Source, known: Set[str]) -> None:
    """Raise `CheckpointError` where config.json says something that is none of these."""
    unknown = sorted(source.config.keys() - known)
    if unknown:
        raise CheckpointError(
            f"config.json has a field {unknown[0]} that no version of the format is known to have",
            where=f"{source.directory / 'config.json'}: {unknown[0]}",
            hint="it may change what the draft computes: remove it if you know that it does not",
        )


def _layer_config(source: Source) -> dict[str, Any]:
    """The draft's layers, nulls left out (`convert_to_vllm_ckpt` copies them)."""
    block = source.config.get("transformer_layer_config") or {}
    return {name: value for name, value in block.items() if value is not None}


def _put_layer_type(
    fields: Fields, layer: dict[str, Any], source: Source, named: dict[str, TensorInfo]
) -> None:
    """Llama or Qwen3: the file's word, else whether heads are normed. Readers take silence for
    different types (vLLM for Llama, speculators for Qwen3)."""
    kind = layer.get("model_type")
    if kind is None:
        normed = "layers.0.self_attn.q_norm.weight" in named
        fields.put("model_type", "qwen3" if normed else "llama", "tensors")
    elif kind in LAYER_TYPES:
        fields.put("model_type", kind, "checkpoint")
    else:
        raise CheckpointError(
            f"the draft's layers are of type {kind!r}, expected {' or '.join(LAYER_TYPES)}",
            where=f"{source.directory / 'config.json'}: transformer_layer_config.model_type",
            hint="speculators and vLLM know EAGLE-3 drafts of these layers alone",
        )


def _sizes(config: dict[str, Any]) -> dict[str, Any]:
    return {"draft_vocab_size": config.get("draft_vocab_size")}


def _put_residual(fields: Fields, source: Source, params: ConvertParams) -> list[Doubt]:
    """The person's word, then the file's, unless a tool wrote it that writes it into every file."""
    stated = source.config.get(_RESIDUAL)
    if params.norm_before_residual is not None:
        fields.put(_RESIDUAL, params.norm_before_residual, "parameter")
        return []
    made = stated is True and _made_by_model_optimizer(source)
    if stated is None:
        fields.put(_RESIDUAL, False, "layout")
    else:
        fields.put(_RESIDUAL, stated, "checkpoint")
    if stated is not None and not made:
        return []
    meanings = _MADE_MEANINGS if made else _RESIDUAL_MEANINGS
    choices = [Choice(params={_RESIDUAL: v}, meaning=m) for v, m in meanings.items()]
    return [Doubt(about=_RESIDUAL, choices=choices)]


def _made_by_model_optimizer(source: Source) -> bool:
    """`convert_to_vllm_ckpt` copies the export's weights, which have neither `t2d` nor an
    embedding; speculators of that version wrote at least one of the two.
    """
    bare = not source.tensors.keys() & {"t2d", "embed_tokens.weight"}
    return bare and source.config.get("speculators_version") == _DEV14


def _put_rest(
    fields: Fields, config: dict[str, Any], source: Source, params: ConvertParams
) -> None:
    if params.norm_output is not None:
        fields.put("norm_output", params.norm_output, "parameter")
    else:
        fields.put("norm_output", bool(config.get("norm_output")), "checkpoint")
    fields.put("embed_requires_grad", bool(config.get("embed_requires_grad")), "checkpoint")
    put_drafted(fields, params, stated_drafted(source))
