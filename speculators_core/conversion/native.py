"""The speculators format itself as a source: checked, its open questions settled, written anew.

Worth converting where the aux layers or `norm_before_residual` were left out: readers disagree on
what silence means (vLLM 0.32 and speculators 0.9 differ on both).
"""

from __future__ import annotations

from typing import Any

from speculators_core.config import Eagle3Config
from speculators_core.conversion.plan import Choice, Doubt, Inspection, Plan
from speculators_core.conversion.source import Source
from speculators_core.conversion.target import (
    Fields,
    check_pairing,
    pairing_warnings,
    put_aux_layers,
    tensor_of,
    tensor_rows,
    verifier_block,
)
from speculators_core.errors import CheckpointError
from speculators_core.models.verifier_config import VerifierFacts
from speculators_core.params import ConvertParams

_IDS = "eagle_aux_hidden_state_layer_ids"
_RESIDUAL = "norm_before_residual"


class Native:
    """See `plan.Layout`."""

    name = "speculators"

    def recognises(self, source: Source) -> bool:
        return source.config.get("speculators_model_type") == "eagle3"

    def plan(self, source: Source, verifier: VerifierFacts | None, params: ConvertParams) -> Plan:
        fields = Fields()
        doubts = _put_residual(fields, source.config, params)
        residual = fields.found[_RESIDUAL].value
        config = Eagle3Config.parse(
            {**source.config, _RESIDUAL: residual, _IDS: source.config.get(_IDS)},
            where=str(source.directory / "config.json"),
        )
        _put_rest(fields, config)
        num_aux = _num_aux(config, source)
        stated = config.eagle_aux_hidden_state_layer_ids
        doubts += put_aux_layers(fields, stated, "after", num_aux, verifier, params)
        own = config.speculators_config.verifier.model_dump()
        config = fields.config(source, verifier_block(verifier) if verifier else own)
        if verifier:
            check_pairing(config, verifier)
        inspection = Inspection(
            layout=self.name,
            tensors=tensor_rows(source.tensors, config, source, verifier),
            config=fields.found,
            doubts=doubts,
            warnings=pairing_warnings(config, source, verifier),
        )
        return Plan(inspection, config)


def _put_residual(fields: Fields, config: dict[str, Any], params: ConvertParams) -> list[Doubt]:
    stated = config.get(_RESIDUAL)
    if params.norm_before_residual is not None:
        fields.put(_RESIDUAL, params.norm_before_residual, "parameter")
    elif stated is not None:
        fields.put(_RESIDUAL, stated, "checkpoint")
    else:
        fields.put(_RESIDUAL, False, "layout")
        meanings = {False: "as speculators reads silence", True: "as vLLM reads silence"}
        choices = [Choice(params={_RESIDUAL: v}, meaning=m) for v, m in meanings.items()]
        return [Doubt(about=_RESIDUAL, choices=choices)]
    return []


def _num_aux(config: Eagle3Config, source: Source) -> int:
    fc = tensor_of(source.tensors, "fc.weight", source)
    wide = config.verifier_hidden_size
    if len(fc.shape) != 2 or fc.shape[1] % wide:
        raise CheckpointError(
            f"fc.weight is {list(fc.shape)}; its width should be a multiple of {wide}",
            where=f"{fc.file}: fc.weight",
            hint="config.json and tensors disagree: do they belong together?",
        )
    return fc.shape[1] // wide


def _put_rest(fields: Fields, config: Eagle3Config) -> None:
    """Everything that the file says and no rule changes; who wrote it and when is ours to say."""
    ours = {"speculators_config", "transformer_layer_config", "architectures"}
    ours |= {"speculators_version", _RESIDUAL, _IDS}
    values = config.transformer_layer_config.model_dump() | config.model_dump(exclude=ours)
    values["speculative_tokens"] = config.speculative_tokens
    for name, value in values.items():
        fields.put(name, value, "checkpoint")
