"""A written draft on its verifier: the chosen reading, and each reading in doubt, measured."""

from __future__ import annotations

from pathlib import Path

import torch

from speculators_core.checkpoint import load_speculator
from speculators_core.conversion.plan import Choice, Doubt, Inspection, Layout, Plan
from speculators_core.conversion.report import Validation
from speculators_core.conversion.source import Source
from speculators_core.conversion.validate import Answered, answer_prompts, first_token_acceptance
from speculators_core.errors import Stopped
from speculators_core.models.eagle3 import Eagle3Draft
from speculators_core.models.verifier import Verifier, fastest, load_verifier
from speculators_core.models.verifier_config import VerifierFacts
from speculators_core.params import ConvertParams
from speculators_core.progress import Progress


class Trial:
    """The written draft on its verifier: the chosen reading, and each reading in doubt."""

    def __init__(
        self,
        partial: Path,
        source: Source,
        layout: Layout,
        facts: VerifierFacts,
        params: ConvertParams,
        progress: Progress,
    ) -> None:
        self.source, self.layout, self.facts = source, layout, facts
        self.params, self.progress = params, progress
        progress.update(0.55, "loading the verifier")
        device, dtype = fastest()
        self.verifier: Verifier = load_verifier(facts.path, dtype=dtype, device=device)
        self.draft = load_speculator(
            partial, embedding=self.verifier.embedding, dtype=dtype, device=device
        )
        progress.update(0.7, "the verifier answers the built-in prompts")
        self.answered: list[Answered] = answer_prompts(self.verifier)

    def run(self, plan: Plan) -> tuple[Validation, Inspection]:
        """Measure; the inspection comes back with what was measured for each choice."""
        doubts = [self._measured(doubt) for doubt in plan.inspection.doubts]
        accepted = None
        if plan.eagle3.eagle_aux_hidden_state_layer_ids is not None:
            accepted = self._accepts(plan)
            self.progress.note(f"First-token acceptance {accepted:.3f}")
        self.progress.note("Validation succeeded")
        self.progress.update(1.0, "validated")
        inspection = plan.inspection.model_copy(update={"doubts": doubts})
        return Validation(ok=True, first_token_acceptance=accepted), inspection

    def _measured(self, doubt: Doubt) -> Doubt:
        choices = [self._try(choice) for choice in doubt.choices]
        for c in choices:
            if c.first_token_acceptance is not None:
                text = f"{c.meaning}: first-token acceptance {c.first_token_acceptance:.3f}"
                self.progress.note(f"Doubt about {doubt.about}: {c.params} ({text})")
        return doubt.model_copy(update={"choices": choices})

    def _try(self, choice: Choice) -> Choice:
        if not choice.params:
            return choice
        params = self.params.model_copy(update=choice.params)
        plan = self.layout.plan(self.source, self.facts, params)
        if plan.eagle3.eagle_aux_hidden_state_layer_ids is None:
            return choice  # another doubt has to be settled first
        return choice.model_copy(update={"first_token_acceptance": self._accepts(plan)})

    def _accepts(self, plan: Plan) -> float:
        if self.progress.stopping():
            raise Stopped("the conversion was stopped; nothing was written")
        with torch.device("meta"):
            draft = Eagle3Draft(plan.eagle3)
        draft.load_state_dict(self.draft.state_dict(), assign=True)
        draft.rotary = self.draft.rotary  # not part of a state dict; the same in every reading
        ids = plan.eagle3.eagle_aux_hidden_state_layer_ids or []
        return round(first_token_acceptance(draft.eval(), self.verifier, self.answered, ids), 4)
