"""What every EAGLE-3 layout becomes: a speculators-format config, and a row for each tensor.

A layout's reader brings its tensors under their target names; the rest is the same for all.
Light: no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from speculators_core.config import Eagle3Config
from speculators_core.conversion import rows
from speculators_core.conversion.header import TensorInfo
from speculators_core.conversion.plan import ConfigValue, Origin, TensorRow
from speculators_core.conversion.source import Source
from speculators_core.errors import CheckpointError
from speculators_core.models.verifier_config import VerifierFacts

REPORT = "conversion_report.json"
TRAINING_REPORT = "training_report.json"
EAGLE3 = "EAGLE-3 draft"
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


def tensor_of(
    named: Mapping[str, TensorInfo], target: str, source: Source, what: str = EAGLE3
) -> TensorInfo:
    """The source tensor that becomes `target`, or a `CheckpointError` that it is missing from what
    should be a `what`.
    """
    if target not in named:
        raise rows.missing(target, source, what)
    return named[target]


def tensor_rows(
    named: Mapping[str, TensorInfo],
    config: Eagle3Config,
    source: Source,
    verifier: VerifierFacts | None,
) -> list[TensorRow]:
    """A row for each target and each left-over source tensor; names what can't be right."""
    expected = config.tensor_shapes()
    found = [_target_row(target, named, config, source, verifier) for target in sorted(expected)]
    return found + [_unused_row(t, i, config) for t, i in named.items() if t not in expected]


def _target_row(
    target: str,
    named: Mapping[str, TensorInfo],
    config: Eagle3Config,
    source: Source,
    verifier: VerifierFacts | None,
) -> TensorRow:
    if target in named:
        return rows.copied(target, named[target], config)
    other = {"d2t": "t2d", "t2d": "d2t"}.get(target)
    if other is not None and other in named:
        return rows.derived(
            target, named[other], config, f"derived from {other}: the two say the same"
        )
    if target == "embed_tokens.weight":
        _check_shareable(config, source, verifier)
        reason = "not in the file: the verifier's table is used when the draft is loaded"
        return rows.shared(target, config, reason)
    raise rows.missing(target, source, EAGLE3)


def _check_shareable(config: Eagle3Config, source: Source, verifier: VerifierFacts | None) -> None:
    wide = verifier.hidden_size if verifier else config.verifier_hidden_size
    if config.hidden_size != wide:
        raise CheckpointError(
            f"tensor embed_tokens.weight is missing, and the verifier's table is {wide} wide "
            f"where the draft needs {config.hidden_size}",
            where=f"{source.directory}: embed_tokens.weight",
            hint="a draft narrower than its verifier must bring its own embedding",
        )


def _unused_row(target: str, info: TensorInfo, config: Eagle3Config) -> TensorRow:
    reasons = [why for pattern, why in _UNUSED if pattern.search(info.name)]
    if target in ("d2t", "t2d"):
        reasons = ["the draft vocabulary is the whole vocabulary: no map is needed"]
    if not reasons:
        why = f"no EAGLE-3 draft of {config.transformer_layer_config.model_type} layers has it"
        hint = "leaving it out would change the draft; this variant is not supported"
        raise rows.no_place(info, why, hint)
    return rows.unused(info, reasons[0])
