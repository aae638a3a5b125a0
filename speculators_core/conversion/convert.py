"""Convert someone's EAGLE-3 checkpoint to the speculators format, and try it on its verifier.

Tensors are streamed, one piece at a time; nothing in a pickle is run; the output directory appears
only when all of it is written and checked. What a checkpoint can't tell is a doubt, measured where
that is possible and never guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from speculators_core.checkpoint import (
    Pending,
    check_vocab_map,
    complete_or_absent,
    load_speculator,
    write_safetensors,
)
from speculators_core.conversion.inspect import recognise
from speculators_core.conversion.pickled import list_tensors, load_pickled
from speculators_core.conversion.plan import Choice, Doubt, Inspection, Layout, Plan, TensorRow
from speculators_core.conversion.report import ConvertResult, Validation, deployable, write_report
from speculators_core.conversion.source import Source, open_source
from speculators_core.conversion.target import REPORT
from speculators_core.conversion.validate import Answered, answer_prompts, first_token_acceptance
from speculators_core.errors import CheckpointError, Stopped
from speculators_core.models.eagle3 import Eagle3Draft
from speculators_core.models.verifier import Verifier, fastest, load_verifier
from speculators_core.models.verifier_config import VerifierFacts, read_verifier
from speculators_core.params import ConvertParams
from speculators_core.progress import Progress, Quiet

Read = Callable[[str], Tensor]


def convert(
    params: ConvertParams, output: str | Path, progress: Progress | None = None
) -> ConvertResult:
    """Write the converted draft to `output`, which must not exist yet.

    The checkpoint is a directory or a hub id, the verifier a directory. Unsettled doubts make the
    result not `deployable`, they are no error. Raises `CheckpointError` for a tensor or field that
    can't be right, `PairingError` for another verifier's draft, `Conflict` where `output` exists,
    `Stopped` on request; nothing is left behind then.
    """
    output, progress = Path(output), progress or Quiet()
    with complete_or_absent(output) as partial:
        source = open_source(params.checkpoint, list_tensors)
        layout = recognise(source)
        facts = read_verifier(params.verifier)
        plan = layout.plan(source, facts, params)
        progress.note(f"layout {layout.name}, {len(source.tensors)} tensors")
        for warning in plan.inspection.warnings:
            progress.note(f"Warning: {warning}")
        (partial / "config.json").write_text(plan.config.to_json(), encoding="utf-8")
        _write_tensors(source, plan, partial / "model.safetensors", progress)
        validation, inspection = Validation(ok=None, first_token_acceptance=None), plan.inspection
        if params.validate_on_verifier:
            trial = _Trial(partial, source, layout, facts, params, progress)
            validation, inspection = trial.run(plan)
        write_report(partial, output.name, source, plan, facts, validation, inspection)
    return ConvertResult(
        output=str(output),
        report=str(output / REPORT),
        validation=validation,
        deployable=deployable(inspection),
        doubts=inspection.doubts,
        warnings=inspection.warnings,
    )


def _write_tensors(source: Source, plan: Plan, file: Path, progress: Progress) -> None:
    read = _reader(source)
    rows = {row.target: row for row in plan.inspection.tensors if row.how != "unused"}
    if plan.config.has_vocab_map:
        d2t, t2d = (_value(rows[name], read, plan) for name in ("d2t", "t2d"))
        check_vocab_map(d2t, t2d, where=str(source.directory))
    else:
        _check_identity(source, plan, read)
    pending = [
        Pending(
            name=str(row.target),
            shape=tuple(row.shape),
            dtype=getattr(torch, row.dtype),
            read=lambda row=row: _value(row, read, plan),  # type: ignore[misc]
        )
        for row in rows.values()
        if row.how != "shared"
    ]
    for done, name in enumerate(write_safetensors(file, pending), start=1):
        progress.update(0.5 * done / len(pending), f"wrote {name}")
        if progress.stopping():
            raise Stopped("the conversion was stopped; nothing was written")


def _reader(source: Source) -> Read:
    """Tensors by source name; mapped from the file, so that reading one costs no copy."""
    if source.pickled:
        loaded: dict[str, Tensor] = {}
        for file in source.files:
            loaded |= load_pickled(file)
        return loaded.__getitem__
    handles: dict[Path, Any] = {file: safe_open(file, framework="pt") for file in source.files}

    def read(name: str) -> Tensor:
        tensor: Tensor = handles[source.tensors[name].file].get_tensor(name)
        return tensor

    return read


def _value(row: TensorRow, read: Read, plan: Plan) -> Tensor:
    """The tensor of one row; of the vocabulary map, either side gives the other."""
    value = read(str(row.source))
    if row.how == "derived" and row.target == "t2d":
        ids = torch.arange(len(value)) + value.long()
        if bool((ids < 0).any()) or bool((ids >= plan.config.vocab_size).any()):
            raise CheckpointError(
                f"d2t points outside the verifier's vocabulary of {plan.config.vocab_size}",
                where="d2t",
                hint="d2t holds offsets (verifier id = i + d2t[i]); these may be absolute ids",
            )
        kept = torch.zeros(plan.config.vocab_size, dtype=torch.bool)
        kept[ids] = True
        return kept
    if row.how == "derived":
        ids = value.nonzero().flatten()
        if len(ids) != plan.config.draft_vocab_size:
            raise CheckpointError(
                f"t2d keeps {len(ids)} tokens, lm_head has {plan.config.draft_vocab_size} rows",
                where="t2d",
                hint="the map belongs to another draft",
            )
        return ids - torch.arange(len(ids))
    return value.to(getattr(torch, row.dtype)) if row.target in ("d2t", "t2d") else value


def _check_identity(source: Source, plan: Plan, read: Read) -> None:
    """A whole draft vocabulary needs no map; one that reorders it would be lost."""
    for row in plan.inspection.tensors:
        if row.how == "unused" and str(row.source).endswith("d2t") and read(str(row.source)).any():
            raise CheckpointError(
                "the draft vocabulary is the whole vocabulary, but d2t reorders it",
                where=f"{source.directory}: {row.source}",
                hint="vLLM and speculators can't express that",
            )


class _Trial:
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
        if plan.config.eagle_aux_hidden_state_layer_ids is not None:
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
        if plan.config.eagle_aux_hidden_state_layer_ids is None:
            return choice  # another doubt has to be settled first
        return choice.model_copy(update={"first_token_acceptance": self._accepts(plan)})

    def _accepts(self, plan: Plan) -> float:
        if self.progress.stopping():
            raise Stopped("the conversion was stopped; nothing was written")
        with torch.device("meta"):
            draft = Eagle3Draft(plan.config)
        draft.load_state_dict(self.draft.state_dict(), assign=True)
        draft.rotary = self.draft.rotary  # not part of a state dict; the same in every reading
        ids = plan.config.eagle_aux_hidden_state_layer_ids or []
        return round(first_token_acceptance(draft.eval(), self.verifier, self.answered, ids), 4)
