"""Drafts of AngelSlim (Tencent): research keys, a copy of the verifier's embedding, and ids that
count outputs (`aux_hidden_states_layer_ids`; FORMATS 4.6 and 5.1). Light: no torch.
"""

from __future__ import annotations

from speculators_core.conversion.aux_layers import IDS, StatedIds, read_ids
from speculators_core.conversion.naming import is_draft
from speculators_core.conversion.plain import Said, plan_plain
from speculators_core.conversion.plan import Plan
from speculators_core.conversion.source import Source
from speculators_core.models.verifier_config import VerifierFacts
from speculators_core.params import ConvertParams

_IDS = "aux_hidden_states_layer_ids"
_MARKS = {_IDS, "target_model_type"}


class AngelSlim:
    """See `plan.Layout`."""

    name = "eagle3-angelslim"

    def recognises(self, source: Source) -> bool:
        config = source.config
        if "speculators_model_type" in config or not is_draft(source):
            return False
        named = "Eagle3LlamaForCausalLM" in (config.get("architectures") or [])
        return bool(_MARKS & config.keys()) or (named and IDS not in config)

    def plan(self, source: Source, verifier: VerifierFacts | None, params: ConvertParams) -> Plan:
        return plan_plain(self.name, source, verifier, params, Said(ids=_ids(source)))


def _ids(source: Source) -> StatedIds:
    """AngelSlim's own list, unless the one that someone added for vLLM says something else."""
    outputs, after = (read_ids(source.config, field, source) for field in (_IDS, IDS))
    if outputs is None:
        return StatedIds(after)
    disputed = after is not None and [k + 1 for k in outputs] != after
    return StatedIds(outputs, "output", "AngelSlim", disputed)
