"""The research layout of EAGLE-3 (SafeAILab/EAGLE and who writes like it).

A plain Llama config, one `midlayer`, usually no embedding and never the aux layers (FORMATS 4.2).
Where someone has added ids by hand, nothing says how they count. Light: no torch.
"""

from __future__ import annotations

from speculators_core.conversion.aux_layers import IDS, StatedIds, read_ids
from speculators_core.conversion.naming import is_draft
from speculators_core.conversion.plain import Said, plan_plain
from speculators_core.conversion.plan import Plan
from speculators_core.conversion.source import Source
from speculators_core.models.verifier_config import VerifierFacts
from speculators_core.params import ConvertParams


class Research:
    """See `plan.Layout`. Asked last of the EAGLE-3 layouts: the others look like it, and more."""

    name = "eagle3-research"

    def recognises(self, source: Source) -> bool:
        return "speculators_model_type" not in source.config and is_draft(source)

    def plan(self, source: Source, verifier: VerifierFacts | None, params: ConvertParams) -> Plan:
        block = source.config.get("eagle_config") or {}
        ids = read_ids(block, IDS, source) or read_ids(source.config, IDS, source)
        return plan_plain(self.name, source, verifier, params, Said(ids=StatedIds(ids)))
