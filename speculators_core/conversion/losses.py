"""What a speculator says that the layout it is exported to has no words for. Light: no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict

from speculators_core.config import Eagle3Config, default_aux_layers
from speculators_core.conversion.aux_layers import IDS
from speculators_core.conversion.exported import BIASES, SWITCHES, ExportLayout, window_of
from speculators_core.conversion.source import Source
from speculators_core.errors import InputError
from speculators_core.launch import portable_name
from speculators_core.models.verifier_config import VerifierFacts


class Loss(BaseModel):
    """What the layout can't say. `serious`: its readers would compute something else."""

    model_config = ConfigDict(frozen=True)

    field: str
    value: Any
    meaning: str
    serious: bool = False


def losses_of(
    config: Eagle3Config, layout: ExportLayout, verifier: VerifierFacts | None
) -> Iterator[Loss]:
    """The losses of a draft's config. Raises `InputError` where the layout can't hold the draft in
    any case.
    """
    layer = config.transformer_layer_config
    if layer.num_hidden_layers > 1:
        raise InputError(
            f"the {layout.name} layout has one draft layer, this draft has "
            f"{layer.num_hidden_layers}",
            where="num_hidden_layers",
            hint="vLLM serves it as it is",
        )
    if layer.norms_heads:
        raise InputError(
            f"the {layout.name} layout has a Llama's layer, this draft has a Qwen3's, which norms "
            "each head of query and key",
            where="transformer_layer_config.model_type",
            hint="vLLM serves it as it is",
        )
    for switch, meaning in SWITCHES.items():
        if getattr(config, switch) and switch not in layout.switches:
            if switch == "norm_output" and layout.name == "specforge":
                meaning += (
                    "; SpecForge's switch of this name is another; to convert back: --norm-output"
                )
            yield Loss(field=switch, value=True, meaning=meaning, serious=True)
    for bias in BIASES:
        if getattr(layer, bias):
            yield Loss(field=bias, value=True, meaning="linear layers have biases", serious=True)
    yield from (_research_ids if layout.name == "research" else _specforge_ids)(config, verifier)
    k = config.speculative_tokens
    yield Loss(field="speculative_tokens", value=k, meaning="a server is told at its start")
    if config.embed_requires_grad:
        yield Loss(field="embed_requires_grad", value=True, meaning="matters to trainers alone")
    yield Loss(
        field="speculators_config.verifier",
        value=portable_name(config.speculators_config.verifier.name_or_path),
        meaning="the layout names no verifier",
    )
    yield from _passed_through(config)


def _passed_through(config: Eagle3Config) -> Iterator[Loss]:
    """Further keys of the layers' config; of those only a window of attention changes numbers."""
    window = window_of(config)
    for name, value in (config.transformer_layer_config.model_extra or {}).items():
        if name == "sliding_window" and window:
            meaning = "the draft looks back over so many tokens only"
            yield Loss(field=name, value=value, meaning=meaning, serious=True)
        elif value is not None and name not in (*window, "use_sliding_window"):
            yield Loss(field=name, value=value, meaning="no reader of the layout needs it")


def _research_ids(config: Eagle3Config, verifier: VerifierFacts | None) -> Iterator[Loss]:
    ids = config.eagle_aux_hidden_state_layer_ids
    said = "EAGLE's code takes the states after layers 2, n/2 and n-3 of an n-layer verifier"
    if ids is None:
        yield Loss(field=IDS, value=None, meaning=f"unknown here, too; {said}")
    elif verifier is None:
        known = ",".join(map(str, ids))
        yield Loss(field=IDS, value=ids, meaning=f"{said}; to convert back: --aux-layers {known}")
    else:
        implied = list(default_aux_layers(verifier.num_hidden_layers))
        fits = "just these" if implied == ids else f"here {implied}, others than these"
        serious = implied != ids
        yield Loss(field=IDS, value=ids, meaning=f"{said}: {fits}", serious=serious)


def _specforge_ids(config: Eagle3Config, _verifier: VerifierFacts | None) -> Iterator[Loss]:
    ids = config.eagle_aux_hidden_state_layer_ids
    if ids is None:
        meaning = "unknown here, too; SGLang takes the states after layers 2, n/2 and n-3"
        yield Loss(field=IDS, value=None, meaning=meaning)
        return
    if ids[0] == 0:
        raise InputError(
            "the layout counts outputs of layers, and this draft sees the embedding's",
            where=IDS,
            hint="vLLM serves it as it is",
        )
    if len(ids) != 3:
        meaning = "SpecForge and SGLang take exactly three"
        yield Loss(field=IDS, value=ids, meaning=meaning, serious=True)
    if ids[0] != 2:
        meaning = (
            f"written as outputs {[k - 1 for k in ids]}; SGLang since its pull request 25454 adds "
            "one only to a list that begins with 1, and would take the layers before these; to "
            f"convert back: --aux-layers {','.join(map(str, ids))}"
        )
        yield Loss(field=IDS, value=ids, meaning=meaning)


def precision_losses(source: Source, config: Eagle3Config) -> Iterator[Loss]:
    """The loss of tensors in another precision than the config names."""
    others = sorted(
        name for name, info in source.tensors.items() if info.dtype != config.tensor_dtype(name)
    )
    if others:
        meaning = f"{', '.join(others)} are stored otherwise and are written as they are"
        yield Loss(field="dtype", value=config.dtype, meaning=meaning)
