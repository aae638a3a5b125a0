"""Exports of SpecForge (sgl-project): research keys, optionally `eagle_config` and `fc_norm`.

Its ids count outputs (FORMATS 4.3 and 5.1), and its `norm_output` is another switch than that of
speculators: a norm before `lm_head`, on by default, while the un-normed state is fed back
(FORMATS 5.2). SGLang reads the same switch as speculators does. Light: no torch.
"""

from __future__ import annotations

from speculators_core.conversion.aux_layers import IDS, StatedIds, read_ids
from speculators_core.conversion.naming import is_draft, uses_midlayer
from speculators_core.conversion.plain import Said, plan_plain
from speculators_core.conversion.plan import Choice, Doubt, Plan
from speculators_core.conversion.source import Source
from speculators_core.errors import CheckpointError
from speculators_core.models.verifier_config import VerifierFacts
from speculators_core.params import ConvertParams

ARCHITECTURE = "LlamaForCausalLMEagle3"
_SWITCH = "norm_output"
_CHOICES = [
    Choice(
        params={_SWITCH: False},
        meaning="as SpecForge trains: the un-normed state is fed back",
    ),
    Choice(
        params={_SWITCH: True},
        meaning="as SGLang reads it (EAGLE-3.1): the normed state is fed back; shows from the "
        "second drafted token on",
    ),
]


class SpecForge:
    """See `plan.Layout`."""

    name = "eagle3-specforge"

    def recognises(self, source: Source) -> bool:
        named = ARCHITECTURE in (source.config.get("architectures") or [])
        ours = named and "speculators_model_type" not in source.config
        return ours and is_draft(source) and uses_midlayer(source)

    def plan(self, source: Source, verifier: VerifierFacts | None, params: ConvertParams) -> Plan:
        block = source.config.get("eagle_config") or {}
        nested = read_ids(block, IDS, source)
        stated = StatedIds(nested, "output", "SpecForge")
        if nested is None:  # one that someone added for vLLM, which counts otherwise
            stated = StatedIds(read_ids(source.config, IDS, source))
        said = Said(ids=stated, norm_output=False, doubts=_doubts(source, params))
        return plan_plain(self.name, source, verifier, params, said)


def _doubts(source: Source, params: ConvertParams) -> list[Doubt]:
    """Set together with `fc_norm` it is the pair of EAGLE-3.1, which SGLang serves one way and
    SpecForge trains another: asked for. Alone it is SpecForge's default, written out.
    """
    stated = source.config.get(_SWITCH)
    if stated is False:
        raise CheckpointError(
            "norm_output is false: SpecForge's lm_head then sees the state without its final norm",
            where=f"{source.directory / 'config.json'}: {_SWITCH}",
            hint="neither vLLM nor speculators can express that; train with the norm",
        )
    if stated is None or params.norm_output is not None:
        return []
    pair = any(".fc_norm." in f".{name}" for name in source.tensors)
    return [Doubt(about=_SWITCH, choices=_CHOICES, chosen=None if pair else 0)]
