"""The draft's rotary positions: the file's word, else the verifier's. Light: no torch.

A base that no file states means 10000 to a Llama config, and a draft that is run at another base
than it was trained on loses acceptance as the context grows, without any error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from speculators_core.conversion.plan import Choice, Doubt
from speculators_core.conversion.source import Source
from speculators_core.conversion.target import Fields
from speculators_core.errors import CheckpointError
from speculators_core.models.verifier_config import VerifierFacts
from speculators_core.params import ConvertParams

ABOUT = "rope_theta is not in the checkpoint"
_FIELD = "rope_parameters"
_SILENT = 10000.0  # what a Llama config means when it names no base


def put_rope(
    fields: Fields,
    config: Mapping[str, Any],
    source: Source,
    verifier: VerifierFacts | None,
    params: ConvertParams,
) -> tuple[list[Doubt], list[str]]:
    """Settle `rope_parameters`; the doubt about a missing base, and the warning about one that is
    not the verifier's. Raises `CheckpointError` for a base that is no positive number.
    """
    base, scaling = _stated(config, source)
    theirs = verifier.rope_parameters if verifier else {}
    if params.rope_theta is not None:
        fields.put(_FIELD, {**scaling, "rope_theta": params.rope_theta}, "parameter")
        return [], []
    if base is not None:
        fields.put(_FIELD, {**scaling, "rope_theta": base}, "checkpoint")
        return [], _differs(base, theirs)
    found = base_of(theirs)
    if found is not None and not _has_scaling(scaling):
        scaling = {**scaling, **theirs}
    fields.put(_FIELD, {**scaling, "rope_theta": found or _SILENT}, "verifier")
    if found == _SILENT:
        return [], []  # every reading says so
    silent = Choice(
        params={"rope_theta": _SILENT},
        meaning=f"what a Llama config means by silence: {_SILENT:g}",
    )
    if found is None:
        return [Doubt(about=ABOUT, choices=[silent])], []
    verifiers = Choice(params={"rope_theta": found}, meaning=f"the verifier's: {found:g}")
    return [Doubt(about=ABOUT, choices=[verifiers, silent], chosen=0)], []


def base_of(rope: Mapping[str, Any]) -> float | None:
    """The one base of these parameters; None where there is none, or one for each layer type."""
    base = rope.get("rope_theta")
    return float(base) if isinstance(base, (int, float)) and not isinstance(base, bool) else None


def _stated(config: Mapping[str, Any], source: Source) -> tuple[float | None, dict[str, Any]]:
    """The base and the rest of what the file says. transformers 5 writes one block, transformers 4
    a base and a block, Model-Optimizer a block that may hold the base.
    """
    where = f"{source.directory / 'config.json'}"
    blocks = [config.get("rope_parameters"), config.get("rope_scaling")]
    whole = {name: v for name, v in (blocks[0] or blocks[1] or {}).items() if v is not None}
    partial = whole.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1
    if partial != 1:
        raise CheckpointError(
            f"partial_rotary_factor is {partial!r}: only a part of each head is rotated",
            where=where,
            hint="vLLM's Llama drafts rotate whole heads; this draft can't be expressed",
        )
    _check_scaling(whole, where)
    kind, inner = whole.pop("type", "default"), whole.pop("rope_theta", None)
    outer = config.get("rope_theta")
    first, second = (inner, outer) if blocks[0] else (outer, inner)
    base = second if first is None else first
    if base is not None and not _is_base(base):
        raise CheckpointError(
            f"rope_theta should be a positive number, found {base!r}",
            where=f"{where}: rope_theta",
            hint="correct config.json, or ask where the checkpoint came from",
        )
    return (None if base is None else float(base)), {"rope_type": kind, **whole}


def _check_scaling(whole: Mapping[str, Any], where: str) -> None:
    """Raise `CheckpointError` for a type that is no name, or a factor that is no number."""
    for field, value in whole.items():
        name = field in ("type", "rope_type")
        number = field == "factor" or field.endswith("_freq_factor")
        if (name and not isinstance(value, str)) or (number and not _is_base(value)):
            raise CheckpointError(
                f"{field} should be {'a name' if name else 'a positive number'}, found {value!r}",
                where=f"{where}: {field}",
                hint="correct rope_parameters or rope_scaling in config.json",
            )


def _is_base(value: Any) -> bool:
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    return bool(numeric and math.isfinite(value) and value > 0)


def _has_scaling(scaling: Mapping[str, Any]) -> bool:
    return bool(scaling.get("rope_type", "default") != "default")


def _differs(base: float, theirs: Mapping[str, Any]) -> list[str]:
    other = base_of(theirs)
    if other is None or other == base:
        return []
    return [
        f"the draft's RoPE base is {base:g}, its verifier's {other:g}: right if it was trained so, "
        "else acceptance falls as the context grows"
    ]
