"""What every EAGLE-3 layout becomes: a speculators-format config, and a row for each tensor.

A layout's reader brings its tensors under their target names; the rest is the same for all.
Light: no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from speculators_core.config import Eagle3Config, default_aux_layers, read_json
from speculators_core.conversion.plan import Choice, ConfigValue, Doubt, Origin, TensorRow
from speculators_core.conversion.source import Source, TensorInfo
from speculators_core.errors import CheckpointError, PairingError
from speculators_core.models.verifier_config import VerifierFacts, tokenizer_fingerprint
from speculators_core.params import ConvertParams

REPORT = "conversion_report.json"
_TOP_LEVEL = frozenset(Eagle3Config.model_fields)
_UNUSED = (
    (re.compile(r"rotary_emb\.inv_freq$"), "computed from rope_parameters"),
    (re.compile(r"^verifier_(norm|lm_head)\."), "the verifier's own, kept by a trainer"),
)


class Fields:
    """Config values as they are found, each with its origin."""

    def __init__(self) -> None:
        self.found: dict[str, ConfigValue] = {}

    def put(self, name: str, value: Any, origin: Origin) -> Any:
        self.found[name] = ConfigValue(value=value, origin=origin)
        return value

    def config(self, source: Source, verifier: Mapping[str, Any]) -> Eagle3Config:
        """The result's config, for the verifier that this `speculators_config.verifier` names.

        Raises `CheckpointError` that names the first field at fault.
        """
        values = {name: field.value for name, field in self.found.items()}
        k = values.pop("speculative_tokens")
        top = {name: values.pop(name) for name in list(values) if name in _TOP_LEVEL}
        block = {"proposal_methods": [{"speculative_tokens": k}], "verifier": dict(verifier)}
        return Eagle3Config.parse(
            {**top, "speculators_config": block, "transformer_layer_config": values},
            where=str(source.directory / "config.json"),
        )


def verifier_block(verifier: VerifierFacts | None) -> dict[str, Any]:
    """`speculators_config.verifier`; empty while nobody has named the verifier."""
    return {
        "name_or_path": verifier.path if verifier else "",
        "architectures": verifier.architectures if verifier else [],
    }


def tensor_of(named: Mapping[str, TensorInfo], target: str, source: Source) -> TensorInfo:
    """The source tensor that becomes `target`, or a `CheckpointError` that it is missing."""
    if target not in named:
        raise CheckpointError(
            f"tensor {target} is missing",
            where=f"{source.directory}: {target}",
            hint="the checkpoint is incomplete, or not an EAGLE-3 draft",
        )
    return named[target]


def tensor_rows(
    named: Mapping[str, TensorInfo],
    config: Eagle3Config,
    source: Source,
    verifier: VerifierFacts | None,
) -> list[TensorRow]:
    """A row for each target and each left-over source tensor; names what can't be right."""
    rows = [
        _target_row(target, shape, named, config, source, verifier)
        for target, shape in sorted(config.tensor_shapes().items())
    ]
    expected = config.tensor_shapes()
    rows += [_unused_row(t, i, source) for t, i in named.items() if t not in expected]
    return rows


def _target_row(
    target: str,
    shape: tuple[int, ...],
    named: Mapping[str, TensorInfo],
    config: Eagle3Config,
    source: Source,
    verifier: VerifierFacts | None,
) -> TensorRow:
    dtype = {"d2t": "int64", "t2d": "bool"}.get(target, config.dtype)
    base = {"target": target, "shape": list(shape), "dtype": dtype}
    if target in named:
        info = named[target]
        if info.shape != shape:
            raise CheckpointError(
                f"tensor {info.name} has shape {list(info.shape)}, expected {list(shape)}",
                where=f"{info.file}: {info.name}",
                hint="config.json and tensors disagree: do they belong together?",
            )
        reason = "renamed" if info.name != target else "as it is"
        reason += f", {info.dtype} to {dtype}" if info.dtype != dtype else ""
        return TensorRow(source=info.name, reason=reason, how="copied", **base)
    other = {"d2t": "t2d", "t2d": "d2t"}.get(target)
    if other is not None and other in named:
        reason = f"derived from {other}: the two say the same"
        return TensorRow(source=named[other].name, reason=reason, how="derived", **base)
    if target == "embed_tokens.weight":
        _check_shareable(config, source, verifier)
        reason = "not in the file: the verifier's table is used when the draft is loaded"
        return TensorRow(source=None, reason=reason, how="shared", **base)
    tensor_of(named, target, source)
    raise AssertionError(target)  # tensor_of has raised: the tensor is missing


def _check_shareable(config: Eagle3Config, source: Source, verifier: VerifierFacts | None) -> None:
    wide = verifier.hidden_size if verifier else config.verifier_hidden_size
    if config.hidden_size != wide:
        raise CheckpointError(
            f"tensor embed_tokens.weight is missing, and the verifier's table is {wide} wide "
            f"where the draft needs {config.hidden_size}",
            where=f"{source.directory}: embed_tokens.weight",
            hint="a draft narrower than its verifier must bring its own embedding",
        )


def _unused_row(target: str, info: TensorInfo, source: Source) -> TensorRow:
    reasons = [why for pattern, why in _UNUSED if pattern.search(info.name)]
    if target in ("d2t", "t2d"):
        reasons = ["the draft vocabulary is the whole vocabulary: no map is needed"]
    if not reasons:
        raise CheckpointError(
            f"tensor {info.name} {list(info.shape)} has no place in an EAGLE-3 draft",
            where=f"{source.directory}: {info.name}",
            hint="leaving it out would change the draft; this variant is not supported",
        )
    return TensorRow(
        source=info.name,
        target=None,
        shape=list(info.shape),
        dtype=info.dtype,
        reason=reasons[0],
        how="unused",
    )


def check_pairing(config: Eagle3Config, verifier: VerifierFacts) -> None:
    """Raise `PairingError` unless width, vocabulary and layer numbers fit the verifier."""
    for what, draft, theirs in (
        ("vocabulary", config.vocab_size, verifier.vocab_size),
        ("hidden size", config.verifier_hidden_size, verifier.hidden_size),
    ):
        if draft != theirs:
            raise PairingError(
                f"the draft was made for a verifier with {what} {draft}, this one has {theirs}",
                where=verifier.path,
                hint="choose the verifier that the draft was trained for",
            )
    ids = config.eagle_aux_hidden_state_layer_ids or []
    if ids and ids[-1] > verifier.num_hidden_layers:
        raise PairingError(
            f"aux layer {ids[-1]} is out of range: the verifier has "
            f"{verifier.num_hidden_layers} layers",
            where="eagle_aux_hidden_state_layer_ids",
            hint="name the layers the draft was trained on, counted after k layers: 0 to "
            f"{verifier.num_hidden_layers}",
        )


def pairing_warnings(
    config: Eagle3Config, source: Source, verifier: VerifierFacts | None
) -> list[str]:
    """What does not forbid the pair, but should be seen."""
    warnings = []
    if config.num_aux != 3:
        warnings.append(
            f"the draft takes {config.num_aux} aux states; vLLM 0.32 serves Llama drafts with "
            "exactly 3"
        )
    theirs = tokenizer_fingerprint(source.directory) or _recorded_fingerprint(source)
    if verifier and theirs and theirs != verifier.tokenizer_fingerprint:
        warnings.append(
            "the tokenizer that came with the draft differs from the verifier's: "
            "the same vocabulary size, but maybe not the same tokens"
        )
    return warnings


def _recorded_fingerprint(source: Source) -> str | None:
    report = source.directory / REPORT
    if not report.exists():
        return None
    verifier = read_json(report).get("verifier")
    found = verifier.get("tokenizer_fingerprint") if isinstance(verifier, dict) else None
    return found if isinstance(found, str) else None


def put_aux_layers(
    fields: Fields,
    stated: list[int] | None,
    stated_convention: str | None,
    num_aux: int,
    verifier: VerifierFacts | None,
    params: ConvertParams,
) -> list[Doubt]:
    """Settle which verifier states the draft sees, always written "after k layers".

    The person's word first, then a list in the file whose convention its layout defines. Anything
    else is a doubt and writes no ids: a wrong guess loads, serves and silently accepts nothing.
    """
    field = "eagle_aux_hidden_state_layer_ids"
    given = list(params.aux_layers) if params.aux_layers is not None else None
    ids, convention = (given, params.aux_convention) if given else (stated, stated_convention)
    if ids is None or convention is None:
        fields.put(field, None, "checkpoint")
        if num_aux != 3:
            raise CheckpointError(
                f"fc.weight takes {num_aux} aux states, and the checkpoint does not say which",
                where=field,
                hint=f"name the {num_aux} layers that the draft was trained on: --aux-layers",
            )
        return [Doubt(about="aux layers", choices=_aux_choices(stated, verifier))]
    if len(ids) != num_aux:
        raise CheckpointError(
            f"{len(ids)} aux layers are named {ids}, fc.weight takes {num_aux}",
            where=field,
            hint=f"name exactly {num_aux}",
        )
    after = [k + 1 for k in ids] if convention == "output" else list(ids)
    fields.put(field, after, "parameter" if given else "checkpoint")
    return []


def _aux_choices(stated: list[int] | None, verifier: VerifierFacts | None) -> list[Choice]:
    if stated is not None:
        return [
            _choice(stated, "after", "the file's ids, state after k layers"),
            _choice(stated, "output", "the file's ids, 0-based output of layer k"),
        ]
    if verifier is None:
        return []
    low, middle, high = default_aux_layers(verifier.num_hidden_layers)
    ids = [low, middle, high]
    return [
        _choice(ids, "after", "the usual layers: EAGLE, speculators, vLLM; SpecForge's defaults"),
        _choice(ids, "output", "the same numbers as 0-based outputs: one layer later"),
        _choice([k - 1 for k in ids], "after", "one layer earlier"),
    ]


def _choice(ids: list[int], convention: str, meaning: str) -> Choice:
    return Choice(params={"aux_layers": ids, "aux_convention": convention}, meaning=meaning)
