"""DFlash drafts as z-lab releases them: a Qwen3 body without embedding and head.

`dflash_config` says the mask token and which verifier states `fc` takes, as 0-based outputs of
layers; the speculators format counts the same states one higher, "after k layers". Embedding and
head are the verifier's and are never stored. What that format can't say is refused. Light: no
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculators_core.conversion import rows
from speculators_core.conversion.aux_layers import counted_after
from speculators_core.conversion.options import put_drafted
from speculators_core.conversion.pairing import (
    check_layers,
    check_sizes,
    tokenizer_warnings,
    verifier_block,
)
from speculators_core.conversion.plan import Doubt, Inspection, Plan, TensorRow
from speculators_core.conversion.rope import put_rope
from speculators_core.conversion.sizes import flat_config
from speculators_core.conversion.source import Source
from speculators_core.conversion.target import Fields
from speculators_core.errors import CheckpointError, InputError
from speculators_core.model_config import positive
from speculators_core.models.dflash_config import SHARED, SLIDING, DFlashConfig
from speculators_core.models.verifier_config import VerifierFacts
from speculators_core.params import ConvertParams

IDS = "aux_hidden_state_layer_ids"
_BODY = frozenset({"fc.weight", "hidden_norm.weight", "norm.weight"})
_BLOCK = frozenset({"mask_token_id", "target_layer_ids", "block_size", "causal"})
OTHERWISE_SAID = frozenset(
    {"architectures", "auto_map", "block_size", "dflash_config", "num_target_layers", "dtype"}
    | {"torch_dtype", "transformers_version", "target_hidden_size", "text_config"}
    | {"rope_theta", "rope_scaling", "rope_parameters", "is_neox_style", "is_causal"}
)
_ELSEWHERE = "serve the checkpoint as it is with vLLM, which reads z-lab's own layout"
MIXED = (
    "some layers look back over a window, causal within a block, and others over everything, not "
    "causal: speculators means just that, but vLLM 0.32 takes such a file's layers to be causal all"
)


class DFlash:
    """See `plan.Layout`."""

    name = "dflash"

    def recognises(self, source: Source) -> bool:
        config, names = source.config, source.tensors
        if "speculators_model_type" in config:
            return False
        named = any("DFlash" in name for name in config.get("architectures") or ())
        body = names.keys() >= _BODY and "embed_tokens.weight" not in names
        return "dflash_config" in config or named or body

    def plan(self, source: Source, verifier: VerifierFacts | None, params: ConvertParams) -> Plan:
        config, fields = flat_config(source), Fields()
        block = config.get("dflash_config") or {}
        _refuse_variants(config, block, source)
        doubts, warnings = _put_layers(fields, config, source, verifier, params)
        warnings += _put_draft(fields, config, block, source, params)
        about, name_warnings = verifier_block(verifier, params, source)
        result = dflash_config(fields, about, source)
        if verifier:
            check_pairing(result, config, verifier)
        if result.mixes_attention:
            warnings.append(MIXED)
        inspection = Inspection(
            layout=self.name,
            tensors=_rows(result, source),
            config=fields.found,
            doubts=doubts,
            warnings=[*warnings, *tokenizer_warnings(source.directory, verifier), *name_warnings],
        )
        return Plan(inspection, result)


def _refuse_variants(config: Mapping[str, Any], block: Mapping[str, Any], source: Source) -> None:
    """Raise `CheckpointError` for what the speculators format can't say of a DFlash draft."""
    where = str(source.directory / "config.json")
    for field in sorted(block.keys() - _BLOCK):
        if block[field] not in (None, False):
            raise CheckpointError(
                f"dflash_config.{field} is {block[field]!r}; the speculators format can't say that",
                where=f"{where}: dflash_config.{field}",
                hint=_ELSEWHERE,
            )
    if config.get("is_neox_style") is False or config.get("is_causal") or block.get("causal"):
        raise CheckpointError(
            "the draft rotates or masks its block otherwise (is_neox_style, is_causal or "
            "dflash_config.causal); the speculators format can't say that",
            where=where,
            hint=_ELSEWHERE,
        )
    if (source.directory / "mask_embedding.pt").exists():
        raise CheckpointError(
            "the draft has an embedding of its own for the mask token (mask_embedding.pt); the "
            "speculators format has no place for it",
            where=str(source.directory / "mask_embedding.pt"),
            hint=_ELSEWHERE,
        )


def _put_layers(
    fields: Fields,
    config: Mapping[str, Any],
    source: Source,
    verifier: VerifierFacts | None,
    params: ConvertParams,
) -> tuple[list[Doubt], list[str]]:
    """The layers' config as the file has it; its rotary base by the same rules as everywhere."""
    for name, value in config.items():
        if name not in OTHERWISE_SAID:
            fields.put(name, value, "checkpoint")
    return put_rope(fields, config, source, verifier, params)


def _put_draft(
    fields: Fields,
    config: Mapping[str, Any],
    block: Mapping[str, Any],
    source: Source,
    params: ConvertParams,
) -> list[str]:
    """What is said beside the layers, in the words of the speculators format."""
    for name in ("block_size", "target_hidden_size"):
        stated = config.get(name, block.get(name))
        if stated is not None or name == "block_size":
            fields.put(name, positive({name: stated}, name, source.directory), "checkpoint")
    mask = block.get("mask_token_id")
    if type(mask) is not int:
        raise CheckpointError(
            f"dflash_config.mask_token_id should be a token id, found {mask!r}",
            where=f"{source.directory / 'config.json'}: dflash_config.mask_token_id",
            hint="the token that stands for a place in the block; ask where the draft came from",
        )
    fields.put("mask_token_id", mask, "checkpoint")
    _put_ids(fields, block, source, params)
    fields.put("draft_vocab_size", config.get("vocab_size"), "checkpoint")
    put_block(fields, source, params)
    # vLLM takes false to mean that all layers are causal within a block, also full attention
    kinds = config.get("layer_types") or []
    fields.put("sliding_window_non_causal", SLIDING not in kinds, "layout")
    dtype, warnings = rows.precision(source.tensors, "fc.weight", source)
    fields.put("dtype", dtype, "tensors")
    return warnings


def put_block(
    fields: Fields, source: Source, params: ConvertParams, stated: int | None = None
) -> None:
    """K: what a block has beside its anchor, or fewer where a person or the file says so."""
    anchor = fields.found.get("sample_from_anchor")
    most = fields.found["block_size"].value - (0 if anchor and anchor.value is True else 1)
    if most < 1:
        raise CheckpointError(
            f"block_size is {most + 1}: nothing would be drafted",
            where=f"{source.directory / 'config.json'}: block_size",
            hint="correct config.json, or ask where the checkpoint came from",
        )
    asked = params.speculative_tokens
    if asked is not None and asked > most:
        raise InputError(
            f"speculative_tokens is {asked}, a block of this draft drafts {most} at most",
            where="speculative_tokens",
            hint="leave it out, or name fewer",
        )
    put_drafted(fields, params, stated or most)


def _put_ids(
    fields: Fields, block: Mapping[str, Any], source: Source, params: ConvertParams
) -> None:
    """The states that `fc` takes, counted after k layers. z-lab counts 0-based outputs."""
    if params.aux_layers is not None:
        after = counted_after(params.aux_layers, params.aux_convention or "after")
        fields.put(IDS, after, "parameter")
        return
    ids = block.get("target_layer_ids")
    if not isinstance(ids, list) or not ids or any(type(k) is not int or k < 0 for k in ids):
        raise CheckpointError(
            f"dflash_config.target_layer_ids should be a list of layer ids, found {ids!r}",
            where=f"{source.directory / 'config.json'}: dflash_config.target_layer_ids",
            hint="name the layers that the draft was trained on: --aux-layers",
        )
    asked = params.aux_convention
    after = counted_after(ids, asked or "output")
    fields.put(IDS, after, "parameter" if asked else "checkpoint")


def dflash_config(fields: Fields, verifier: Mapping[str, Any], source: Source) -> DFlashConfig:
    """The config of the result. Raises `CheckpointError` that names the first bad field."""
    values = {name: field.value for name, field in fields.found.items()}
    k = values.pop("speculative_tokens")
    top = {n: values.pop(n) for n in list(values) if n in DFlashConfig.model_fields}
    top.pop("tie_word_embeddings", None)  # the layers' own word, kept in their block
    if "tie_word_embeddings" in fields.found:
        values["tie_word_embeddings"] = fields.found["tie_word_embeddings"].value
    block = {
        "algorithm": "dflash",
        "proposal_methods": [{"speculative_tokens": k}],
        "verifier": dict(verifier),
    }
    return DFlashConfig.parse(
        {**top, "speculators_config": block, "transformer_layer_config": values},
        where=str(source.directory / "config.json"),
    )


def check_pairing(result: DFlashConfig, config: Mapping[str, Any], verifier: VerifierFacts) -> None:
    """Raise `PairingError` unless sizes and layer numbers fit; `config` may count the verifier's
    layers.
    """
    layers = config.get("num_target_layers")
    check_sizes(result.vocab_size, result.verifier_hidden_size, layers, verifier)
    check_layers(result.aux_hidden_state_layer_ids, verifier, IDS)


def _rows(config: DFlashConfig, source: Source) -> list[TensorRow]:
    """A row for each tensor; raises `CheckpointError` for one that is missing or has no place."""
    targets = config.tensor_shapes().keys() - SHARED
    found = []
    for target in sorted(targets):
        if target not in source.tensors:
            raise rows.missing(target, source, "DFlash draft of plain Qwen3 layers")
        found.append(rows.copied(target, source.tensors[target], config))
    reason = "the verifier's own is used when the draft is loaded; such a draft stores none"
    found += [rows.shared(target, config, reason) for target in sorted(SHARED)]
    for name in sorted(source.tensors.keys() - targets):
        info = source.tensors[name]
        if name.endswith("rotary_emb.inv_freq"):
            found.append(rows.unused(info, "computed from rope_parameters"))
        else:
            raise rows.no_place(info, _why(name), _ELSEWHERE)
    return found


def _why(name: str) -> str:
    reasons = {
        "qkv_proj": "Laguna's drafts fuse it, and gate their heads",
        "g_proj": "Laguna's gate on attention, which no Qwen3 layer has",
        "aux_hidden_norms": "Laguna's norms of each verifier state, which fc takes unnormed here",
        "attention_sink_bias": "attention sinks, which no Qwen3 layer has",
        "embed_tokens": "a draft over the whole vocabulary takes its verifier's embedding",
        "lm_head": "a draft over the whole vocabulary takes its verifier's head",
    }
    return next(
        (why for part, why in reasons.items() if part in name),
        "a DFlash draft of plain Qwen3 layers has no such tensor",
    )
