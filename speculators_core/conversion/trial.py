"""A written draft on its verifier: the chosen reading, and each reading in doubt, measured."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from speculators_core.checkpoint import load_speculator
from speculators_core.conversion.plan import Choice, Doubt, Inspection, Layout, Plan
from speculators_core.conversion.report import Validation
from speculators_core.conversion.source import Source
from speculators_core.conversion.validate import (
    PROMPTS,
    Answered,
    answer_prompts,
    first_token_acceptance,
)
from speculators_core.errors import Stopped
from speculators_core.models.eagle3 import Eagle3Draft, llama_config
from speculators_core.models.verifier import Verifier, fastest, load_verifier
from speculators_core.models.verifier_config import VerifierFacts, has_weights
from speculators_core.params import ConvertParams
from speculators_core.progress import Progress
from speculators_core.weights import check_fetched

_REORDERED = (
    "d2t is not in ascending order (Model-Optimizer sorts by frequency): vLLM and Speclab serve it "
    "so, but fine-tuning with speculators 0.9.0 would match its rows with the wrong tokens"
)
_WORDS = {None: "written, not validated", True: "validated", False: "written, a check failed"}
_LATER = frozenset({"norm_output"})  # shows from the second drafted token on


def try_out(
    partial: Path,
    source: Source,
    layout: Layout,
    facts: VerifierFacts,
    plan: Plan,
    params: ConvertParams,
    progress: Progress,
) -> tuple[Validation, Inspection]:
    """Load the written draft and run it on a few prompts, where its verifier is at hand.

    The inspection comes back with what was measured for each choice. The log says which checks
    failed, why nothing was judged, or `Validation succeeded`. Raises `CheckpointError` where the
    result can't be loaded, its logits are not finite or Git LFS has not fetched the verifier,
    `Stopped` on request.
    """
    why = _unable(facts, plan)
    if why:
        progress.note(f"Not validated: {why}")
        progress.update(1.0, "written")
        return Validation(ok=None, first_token_acceptance=None, note=why), plan.inspection
    check_fetched(Path(facts.path).glob("*.safetensors"))
    return Trial(partial, source, layout, facts, params, progress).run(plan)


def _unable(facts: VerifierFacts, plan: Plan) -> str | None:
    if plan.config.algorithm != "eagle3":
        return f"the reference engine does not draft with {plan.config.algorithm}"
    if not has_weights(Path(facts.path)):
        return "the verifier's weights are not at hand, only its config; so nothing was run"
    return None


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
        update = {"doubts": doubts, "warnings": plan.inspection.warnings + self._reordered()}
        validation = self._judged(plan)
        self.progress.update(1.0, _WORDS[validation.ok])
        return validation, plan.inspection.model_copy(update=update)

    def _judged(self, plan: Plan) -> Validation:
        if plan.eagle3.eagle_aux_hidden_state_layer_ids is None:
            why = "the aux layers must be settled first"
            self.progress.note(f"Not validated: {why}")
            return Validation(ok=None, first_token_acceptance=None, note=why)
        accepted = self._accepts(plan)
        self.progress.note(f"First-token acceptance {accepted:.3f}")
        failed = []
        if accepted == 0.0:
            failed.append(f"first-token acceptance is exactly 0 over all {len(PROMPTS)} prompts")
        for check in failed:
            self.progress.note(f"Validation failed: {check}")
        if not failed:
            self.progress.note("Validation succeeded")
        return Validation(ok=not failed, first_token_acceptance=accepted, failed=failed)

    def _reordered(self) -> list[str]:
        if not self.draft.config.has_vocab_map:
            return []
        ids = torch.arange(len(self.draft.d2t), device=self.draft.d2t.device) + self.draft.d2t
        if bool((ids.diff() > 0).all()):
            return []
        self.progress.note(f"Warning: {_REORDERED}")
        return [_REORDERED]

    def _measured(self, doubt: Doubt) -> Doubt:
        choices = [self._try(choice) for choice in doubt.choices]
        for c in choices:
            if c.first_token_acceptance is not None:
                text = f"{c.meaning}: first-token acceptance {c.first_token_acceptance:.3f}"
                self.progress.note(f"Doubt about {doubt.about}: {c.params} ({text})")
        return doubt.model_copy(update={"choices": choices})

    def _try(self, choice: Choice) -> Choice:
        if not choice.params or choice.params.keys() <= _LATER:
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
        # not part of a state dict, and another one where the RoPE base is in doubt
        layers = llama_config(plan.eagle3.transformer_layer_config)
        draft.rotary = LlamaRotaryEmbedding(layers).to(self.verifier.device)
        ids = plan.eagle3.eagle_aux_hidden_state_layer_ids or []
        return round(first_token_acceptance(draft.eval(), self.verifier, self.answered, ids), 4)
