"""The MTP head of a verifier that has one (`mtp.*`: Qwen3-Next, Qwen3.5 and their MoE forms), taken
out of it into a speculators-format checkpoint, to be trained further.

Experts that the file keeps one by one become the two stacked tensors of that format. Embedding and
head are the verifier's and are not stored. `speclab stitch-mtp` puts the head back (`stitch.py`).
Light: no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from speculators_core.conversion import rows
from speculators_core.conversion.header import TensorInfo
from speculators_core.conversion.options import put_drafted
from speculators_core.conversion.pairing import check_sizes, verifier_block
from speculators_core.conversion.plan import Inspection, Plan, TensorRow
from speculators_core.conversion.source import Source
from speculators_core.conversion.target import Fields
from speculators_core.errors import CheckpointError
from speculators_core.models.mtp_config import SHARED, MTPConfig
from speculators_core.models.verifier_config import VerifierFacts
from speculators_core.params import ConvertParams

MTP = "mtp."
OTHERWISE_SAID = frozenset({"torch_dtype", "dtype", "transformers_version", "auto_map"})
_NAMES = {
    "mtp.fc.": "mtp_layers.0.input_proj.",
    "mtp.norm.": "mtp_layers.0.final_layernorm.",
    "mtp.pre_fc_norm_hidden.": "mtp_layers.0.hidden_layernorm.",
    "mtp.pre_fc_norm_embedding.": "mtp_layers.0.token_layernorm.",
    "mtp.layers.0.": "mtp_layers.0.",
}
"""How a prefix in the verifier is called in the speculators format."""
SERVED = "vLLM serves an MTP head inside its verifier: put it back with speclab stitch-mtp"


class MTPHead:
    """See `plan.Layout`."""

    name = "mtp"

    def recognises(self, source: Source) -> bool:
        given = any(name.startswith(MTP) for name in source.tensors)
        return given and "speculators_model_type" not in source.config

    def plan(self, source: Source, verifier: VerifierFacts | None, params: ConvertParams) -> Plan:
        fields = Fields()
        _put_layers(fields, _text_config(source))
        put_drafted(fields, params)
        head = {n: i for n, i in source.tensors.items() if n.startswith(MTP)}
        dtype, warnings = rows.precision(head, "mtp.fc.weight", source)
        fields.put("dtype", dtype, "tensors")
        about, name_warnings = verifier_block(verifier, params, source)
        config = mtp_config(fields, about, source)
        if verifier:
            layers = config.transformer_layer_config.num_hidden_layers
            check_sizes(config.vocab_size, config.verifier_hidden_size, layers, verifier)
        inspection = Inspection(
            layout=self.name,
            tensors=[*_rows(config, head, source), *_left_out(source)],
            config=fields.found,
            doubts=[],
            warnings=[*warnings, SERVED, *name_warnings],
        )
        return Plan(inspection, config)


def native_name(target: str, *, expert: int | None = None, part: str = "") -> str:
    """What the verifier calls a tensor of the speculators format; of stacked experts, one."""
    name = next(
        native + target.removeprefix(prefix)
        for native, prefix in _NAMES.items()
        if target.startswith(prefix)
    )
    if expert is None:
        return name
    return f"{name.rpartition('.')[0]}.{expert}.{part}_proj.weight"


def experts_of(target: str) -> tuple[str, ...] | None:
    """The projections that a stacked tensor holds for each expert, in order; None for others."""
    stacked = {"experts.gate_up_proj": ("gate", "up"), "experts.down_proj": ("down",)}
    return next((parts for end, parts in stacked.items() if target.endswith(end)), None)


def _text_config(source: Source) -> dict[str, Any]:
    return source.config.get("text_config") or source.config


def _put_layers(fields: Fields, config: Mapping[str, Any]) -> None:
    for name, value in config.items():
        if name not in OTHERWISE_SAID and value is not None:
            fields.put(name, value, "checkpoint")
    partial = config.get("partial_rotary_factor")
    if partial is not None:  # transformers 5 keeps it with the base, transformers 4 beside it
        block = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        rope = {"partial_rotary_factor": partial, **(config.get(block) or {})}
        fields.put(block, rope, "checkpoint")


def mtp_config(fields: Fields, verifier: Mapping[str, Any], source: Source) -> MTPConfig:
    """The config of the result. Raises `CheckpointError` that names the first bad field."""
    values = {name: field.value for name, field in fields.found.items()}
    block = {
        "algorithm": "mtp",
        "proposal_methods": [{"speculative_tokens": values.pop("speculative_tokens")}],
        "verifier": dict(verifier),
    }
    dtype = values.pop("dtype")
    return MTPConfig.parse(
        {"dtype": dtype, "speculators_config": block, "transformer_layer_config": values},
        where=str(source.directory / "config.json"),
    )


def _rows(config: MTPConfig, head: dict[str, TensorInfo], source: Source) -> list[TensorRow]:
    """A row for each tensor of the head; raises `CheckpointError` for one missing or too many."""
    left = dict(head)
    found: list[TensorRow] = []
    for target, shape in sorted(config.tensor_shapes().items()):
        if target in SHARED:
            reason = "the verifier's own is used when the head is loaded"
            found.append(rows.shared(target, config, reason))
            continue
        name, parts = native_name(target), experts_of(target)
        if name in left or parts is None:
            if name not in left:
                raise rows.missing(name, source, f"MTP head of {_kind(config)}")
            found.append(rows.copied(target, left.pop(name), config))
        else:
            found += _experts(target, shape, parts, left, source)
    for info in left.values():
        why = f"the MTP head of {_kind(config)} is one layer without such a tensor"
        raise rows.no_place(info, why, "leaving it out would change the head")
    return found


def _kind(config: MTPConfig) -> str:
    return config.transformer_layer_config.model_type


def _experts(
    target: str,
    shape: tuple[int, ...],
    parts: tuple[str, ...],
    left: dict[str, TensorInfo],
    source: Source,
) -> list[TensorRow]:
    """The rows of a stacked tensor: expert after expert, gate above up."""
    one = [shape[1] // len(parts), shape[2]]
    found = []
    for expert in range(shape[0]):
        for part in parts:
            name = native_name(target, expert=expert, part=part)
            if name not in left:
                raise rows.missing(name, source, f"MTP head of {shape[0]} experts")
            info = left.pop(name)
            if list(info.shape) != one:
                raise CheckpointError(
                    f"tensor {name} has shape {list(info.shape)}, expected {one}",
                    where=f"{info.file}: {name}",
                    hint="config.json and tensors disagree: do they belong together?",
                )
            reason = f"expert {expert} of {shape[0]}, stacked"
            found.append(
                TensorRow(
                    source=name,
                    target=target,
                    shape=one,
                    dtype=info.dtype,
                    reason=reason,
                    how="part",
                )
            )
    return found


def _left_out(source: Source) -> list[TensorRow]:
    """The verifier's other tensors, one row for all that begin alike: they may be thousands."""
    begin = Counter(n.split(".")[0] for n in source.tensors if not n.startswith(MTP))
    return [
        TensorRow(
            source=f"{name}.*",
            target=None,
            shape=[],
            dtype="",
            reason=f"{count} tensors of the verifier itself, no part of its MTP head",
            how="unused",
        )
        for name, count in sorted(begin.items())
    ]
