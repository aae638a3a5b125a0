"""Which verifier states a draft sees, and what the numbers in its file mean.

A list of layer ids means one of two things: `after`, the state after k layers (EAGLE,
speculators, vLLM), or `output`, the 0-based output of layer k (SpecForge, Model-Optimizer,
AngelSlim), which is the state after k + 1. A wrong reading loads, serves and accepts little, so it
is settled by evidence or asked for. The rules are in docs/conversion.md. Light: no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from speculators_core.config import default_aux_layers
from speculators_core.conversion.plan import Choice, Doubt
from speculators_core.conversion.source import Source
from speculators_core.conversion.target import Fields
from speculators_core.errors import CheckpointError, InputError
from speculators_core.models.verifier_config import VerifierFacts
from speculators_core.params import ConvertParams

IDS = "eagle_aux_hidden_state_layer_ids"
ABOUT = "aux layers"
Convention = Literal["after", "output"]
_READINGS: tuple[Convention, Convention] = ("after", "output")
_MEANING = {
    "after": "the file's ids, state after k layers",
    "output": "the file's ids, 0-based output of layer k",
}


@dataclass(frozen=True)
class StatedIds:
    """The ids that a file names, None where it names none; what its layout means by them, None
    where it defines nothing; `who`, whose definition that is; `disputed`, that the file names
    other ids in another place.
    """

    ids: list[int] | None = None
    convention: Convention | None = None
    who: str = "the layout"
    disputed: bool = False


def read_ids(block: dict[str, Any], field: str, source: Source) -> list[int] | None:
    """The list under `field`, None where it is empty or missing. Raises `CheckpointError` where it
    holds anything but layer ids.
    """
    ids = block.get(field)
    if ids is None or ids == []:
        return None
    if not isinstance(ids, list) or any(type(k) is not int or k < 0 for k in ids):
        raise CheckpointError(
            f"{field} should be a list of layer ids, found {ids!r}",
            where=f"{source.directory / 'config.json'}: {field}",
            hint="correct config.json, or ask where the checkpoint came from",
        )
    return ids


def put_aux_layers(
    fields: Fields,
    stated: StatedIds,
    num_aux: int,
    verifier: VerifierFacts | None,
    params: ConvertParams,
) -> list[Doubt]:
    """Settle which states the draft sees, always written "after k layers".

    The person's word first, then a list in the file whose reading the evidence settles. Anything
    else is an open doubt and writes no ids. Raises `CheckpointError` where the number of ids is not
    what `fc` takes.
    """
    given = list(params.aux_layers) if params.aux_layers is not None else None
    ids = given or stated.ids
    if ids is not None and len(ids) != num_aux:
        raise CheckpointError(
            f"{len(ids)} aux layers are named {ids}, fc.weight takes {num_aux}",
            where=IDS,
            hint=f"name exactly {num_aux}",
        )
    if given is not None:
        fields.put(IDS, counted_after(given, params.aux_convention or "after"), "parameter")
        return []
    if params.aux_convention is not None:
        return [_as_told(fields, ids, params.aux_convention)]
    if ids is None:
        return [_unknown(fields, num_aux, verifier)]
    reading, why = weigh(ids, stated, verifier)
    fields.put(IDS, counted_after(ids, reading) if reading else None, "checkpoint")
    if reading == "after" == stated.convention:
        return []  # the format's own word, and nothing speaks against it
    return [_reading(ids, reading, why)]


def weigh(
    ids: list[int], stated: StatedIds, verifier: VerifierFacts | None
) -> tuple[Convention | None, str]:
    """The reading that the evidence settles and why; None where it is missing or contradicts."""
    layers = verifier.num_hidden_layers if verifier else None
    if stated.disputed:
        return None, ""
    if layers is not None and max(ids) == layers:
        return "after", f"id {layers} of a verifier of {layers} layers exists only as a state after"
    usual = _usual(layers)
    look: Convention | None = None
    if ids == usual:
        look = "after"
    elif usual and ids == [k - 1 for k in usual]:
        look = "output"
    if stated.convention is None:
        return look, "exactly the usual layers of this verifier, so counted"
    if stated.convention == "output" and look is None and ids[0] == 2:
        look = "after"  # nobody's outputs start with 2 by default
    if look is not None and look != stated.convention:
        return None, ""
    return stated.convention, f"as {stated.who} counts"


def counted_after(ids: Sequence[int], convention: Convention) -> list[int]:
    """The ids that mean the same states, counted after k layers."""
    return [k + 1 for k in ids] if convention == "output" else list(ids)


def _as_told(fields: Fields, ids: list[int] | None, convention: Convention) -> Doubt:
    """The file's ids, counted as a person says."""
    if ids is None:
        raise InputError(
            "aux_convention says how layer ids count, but neither aux_layers nor the checkpoint "
            "names any",
            where="aux_convention",
            hint="name the layers that the draft was trained on: --aux-layers",
        )
    fields.put(IDS, counted_after(ids, convention), "parameter")
    return _reading(ids, convention, "as aux_convention says")


def _reading(ids: list[int], reading: Convention | None, why: str) -> Doubt:
    """The two ways to count the file's ids, and why one of them is taken, if one is."""
    choices = [_choice(ids, convention, _MEANING[convention]) for convention in _READINGS]
    if reading is None:
        return Doubt(about=ABOUT, choices=choices)
    chosen = _READINGS.index(reading)
    meaning = f"{choices[chosen].meaning}: {why}"
    choices[chosen] = choices[chosen].model_copy(update={"meaning": meaning})
    return Doubt(about=ABOUT, choices=choices, chosen=chosen)


def _usual(layers: int | None) -> list[int] | None:
    """The default layers, after k; None where they are unknown or collide."""
    try:
        return list(default_aux_layers(layers)) if layers else None
    except CheckpointError:
        return None


def _unknown(fields: Fields, num_aux: int, verifier: VerifierFacts | None) -> Doubt:
    fields.put(IDS, None, "checkpoint")
    if num_aux != 3:
        raise CheckpointError(
            f"fc.weight takes {num_aux} aux states, and the checkpoint does not say which",
            where=IDS,
            hint=f"name the {num_aux} layers that the draft was trained on: --aux-layers",
        )
    usual = _usual(verifier.num_hidden_layers if verifier else None)
    choices = []
    if usual:
        choices = [
            _choice(usual, "after", "the usual layers: EAGLE, speculators, vLLM; SpecForge too"),
            _choice(usual, "output", "the same numbers as 0-based outputs: one layer later"),
            _choice([k - 1 for k in usual], "after", "one layer earlier"),
        ]
    return Doubt(about=ABOUT, choices=choices)


def _choice(ids: list[int], convention: Convention, meaning: str) -> Choice:
    return Choice(params={"aux_layers": ids, "aux_convention": convention}, meaning=meaning)
