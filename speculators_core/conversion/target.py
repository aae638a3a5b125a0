"""What every EAGLE-3 layout becomes: a speculators-format config, and a row for each tensor.

A layout's reader brings its tensors under their target names; the rest is the same for all.
Light: no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from speculators_core.config import Eagle3Config
from speculators_core.conversion.header import TensorInfo
from speculators_core.conversion.plan import ConfigValue, Origin, TensorRow
from speculators_core.conversion.source import Source
from speculators_core.errors import CheckpointError
from speculators_core.models.verifier_config import VerifierFacts
from speculators_core.precision import castable

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
    dtype = config.tensor_dtype(target)
    base = {"target": target, "shape": list(shape), "dtype": dtype}
    if target in named:
        info = named[target]
        if info.shape != shape:
            raise CheckpointError(
                f"tensor {info.name} has shape {list(info.shape)}, expected {list(shape)}",
                where=f"{info.file}: {info.name}",
                hint="config.json and tensors disagree: do they belong together?",
            )
        if not castable(info.dtype, dtype):
            raise CheckpointError(
                f"tensor {info.name} holds {info.dtype}, expected {dtype}",
                where=f"{info.file}: {info.name}",
                hint="a quantised draft can't be converted: use its weights before quantisation",
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
