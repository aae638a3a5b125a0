"""The config.json of a model: read within bounds, and its fields of the types that readers take
for granted. Light: no torch.

A reader that looks for a name in `architectures` would stumble over `true`. A field that is missing
or null is no fault here: what it then means is for its reader to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from speculators_core.config import read_json
from speculators_core.errors import CheckpointError

_NESTED = ("text_config", "transformer_layer_config")
_LARGEST = 1 << 40


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST


def _is_number(value: Any) -> bool:
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    return numeric and abs(value) < _LARGEST and math.isfinite(value)


_TYPES: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    ("a list of names", _is_names, ("architectures", "layer_types")),
    (
        "a text",
        lambda value: isinstance(value, str),
        ("model_type", "torch_dtype", "dtype", "hidden_act", "speculators_model_type"),
    ),
    (
        "an object",
        lambda value: isinstance(value, dict),
        (
            *("eagle_config", "dflash_config", "speculators_config"),
            *("rope_scaling", "rope_parameters", *_NESTED),
        ),
    ),
    (
        "true or false",
        lambda value: isinstance(value, bool),
        ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad"),
    ),
    (
        f"an integer from 0 to below {_LARGEST}",
        _is_size,
        (
            *("hidden_size", "intermediate_size", "moe_intermediate_size", "target_hidden_size"),
            *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
            *("vocab_size", "draft_vocab_size", "max_position_embeddings", "num_target_layers"),
            "max_window_layers",
        ),
    ),
    (
        "a number",
        _is_number,
        ("rope_theta", "rms_norm_eps", "partial_rotary_factor"),
    ),
)


def read_model_config(directory: Path) -> dict[str, Any]:
    """The fields of DIR/config.json. Raises `CheckpointError` that names the first bad one."""
    file = directory / "config.json"
    values = read_json(file)
    _check(values, str(file))
    return values


def positive(
    values: Mapping[str, Any],
    field: str,
    directory: Path,
    hint: str = "correct config.json, or ask where the checkpoint came from",
) -> int:
    """A size that a config has to have. Raises `CheckpointError` where it is missing or 0."""
    value = values.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(
            f"{field} should be a positive integer, found {value!r}",
            where=f"{directory / 'config.json'}: {field}",
            hint=hint,
        )
    return value


def _check(values: Mapping[str, Any], where: str) -> None:
    for expected, fits, fields in _TYPES:
        for field in fields:
            value = values.get(field)
            if value is not None and not fits(value):
                raise CheckpointError(
                    f"{field} should be {expected}, found {str(value)[:80]!r}",
                    where=f"{where}: {field}",
                    hint="correct config.json, or ask where the checkpoint came from",
                )
    for block in _NESTED:
        if values.get(block):
            _check(values[block], where)
