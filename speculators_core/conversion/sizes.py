"""The sizes of a draft: the config's word, checked against the tensors, and theirs where it is
silent. Light: no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculators_core.config import USUAL_AUX
from speculators_core.conversion.header import TensorInfo
from speculators_core.conversion.naming import count_layers
from speculators_core.conversion.plan import Origin
from speculators_core.conversion.source import Source
from speculators_core.conversion.target import EAGLE3, Fields, tensor_of
from speculators_core.errors import CheckpointError
from speculators_core.model_config import positive
from speculators_core.models.verifier_config import VerifierFacts

_SILENT_EPS = 1e-6


def flat_config(source: Source) -> dict[str, Any]:
    """The config, a nested `text_config` (multimodal wrappers) brought to the top, nulls left
    out: an exporter's null says no more than silence.
    """
    values = {**source.config, **(source.config.get("text_config") or {})}
    return {name: value for name, value in values.items() if value is not None}


def put_sizes(
    fields: Fields, config: Mapping[str, Any], source: Source, named: dict[str, TensorInfo]
) -> None:
    """The layers' sizes: the config's word where it has one, else what the tensors show."""
    fields.put("num_hidden_layers", count_layers(named), "tensors")

    def size(name: str, tensor: str, divide: int = 1) -> int:
        rows = rows_of(named, tensor, source)
        if config.get(name) is not None:
            stated = positive(config, name, source.directory)
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
    heads = positive(config, "num_attention_heads", source.directory)
    fields.put("num_attention_heads", heads, "checkpoint")
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
    own = positive(config, name, source.directory) if config.get(name) is not None else 0
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
        fields.put("vocab_size", positive(config, "vocab_size", source.directory), "checkpoint")
    else:
        fields.put("vocab_size", verifier.vocab_size if verifier else rows, "verifier")


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
    wide = stated or hidden
    fc = tensor_of(named, "fc.weight", source)
    if len(fc.shape) != 2 or fc.shape[1] % wide or not fc.shape[1]:
        raise CheckpointError(
            f"fc.weight is {list(fc.shape)}; its width should be a multiple of the verifier's "
            f"hidden size {wide}",
            where=f"{fc.file}: {fc.name}",
            hint="is this the verifier that the draft was trained for?",
        )
    num_aux: int = fc.shape[1] // wide
    if num_aux != USUAL_AUX:
        fields.put("num_aux_hidden_states", num_aux, "tensors")
    return num_aux


def rows_of(
    named: Mapping[str, TensorInfo], tensor: str, source: Source, what: str = EAGLE3
) -> int:
    """The rows of a tensor, at least one."""
    info = tensor_of(named, tensor, source, what)
    if not info.shape or not info.shape[0]:
        raise CheckpointError(
            f"tensor {info.name} has shape {list(info.shape)}, expected rows",
            where=f"{info.file}: {info.name}",
            hint="the checkpoint is damaged",
        )
    return info.shape[0]


def origin_of(stated: object) -> Origin:
    """Of a value that the config may leave to its layout."""
    return "layout" if stated is None else "checkpoint"
