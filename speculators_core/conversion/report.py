"""What is written beside converted weights: conversion_report.json and a README card.

Neither holds a path of the machine that converted, so the directory can be given away.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from speculators_core.conversion.plan import Doubt, Inspection, Plan
from speculators_core.conversion.source import Source
from speculators_core.conversion.target import REPORT
from speculators_core.models.verifier_config import VerifierFacts


class Validation(BaseModel):
    """`ok` None: it was not run. `first_token_acceptance` in 0..1, None where the aux layers are
    unknown or nothing was run.
    """

    model_config = ConfigDict(frozen=True)

    ok: bool | None
    first_token_acceptance: float | None


class ConvertResult(BaseModel):
    """What `speclab convert --json` prints."""

    model_config = ConfigDict(frozen=True)

    output: str
    report: str
    validation: Validation
    deployable: bool
    doubts: list[Doubt]
    warnings: list[str]


def write_report(
    directory: Path,
    name: str,
    source: Source,
    plan: Plan,
    verifier: VerifierFacts,
    validation: Validation,
    inspection: Inspection,
) -> None:
    """Write the report and the card of the draft `name` into `directory`."""
    report = {
        "source": {
            "name": source.directory.name,
            "files": {file.name: file.stat().st_size for file in source.files},
            "config": source.config,
        },
        "verifier": verifier.model_dump(exclude={"path"}) | {"name": Path(verifier.path).name},
        **inspection.model_dump(mode="json"),
        "validation": validation.model_dump(mode="json"),
        "deployable": deployable(inspection),
    }
    (directory / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    card = _card(name, plan, verifier, validation, inspection)
    (directory / "README.md").write_text(card, encoding="utf-8")


def deployable(inspection: Inspection) -> bool:
    """Whether every doubt is settled."""
    return all(doubt.chosen is not None for doubt in inspection.doubts)


def _card(
    name: str, plan: Plan, verifier: VerifierFacts, validation: Validation, inspection: Inspection
) -> str:
    config = plan.eagle3
    target = Path(verifier.path).name
    spec: dict[str, Any] = {"model": name, "method": "eagle3"}
    spec["num_speculative_tokens"] = config.speculative_tokens
    accepted = validation.first_token_acceptance
    facts = {
        "Verifier": f"{target} ({verifier.num_hidden_layers} layers, H {verifier.hidden_size})",
        "Aux states, after k layers": config.eagle_aux_hidden_state_layer_ids or "unknown",
        "Draft vocabulary": f"{config.draft_vocab_size} of {config.vocab_size}",
        "Residual": "normed" if config.norm_before_residual else "un-normed",
        "Precision": config.dtype,
        "First-token acceptance": "not measured" if accepted is None else f"{accepted:.3f}",
    }
    lines = [
        "---",
        "library_name: speculators",
        "tags: [eagle3, speculative-decoding, speculators]",
        "---",
        f"# {name}",
        "",
        f"An EAGLE-3 draft for {target}, converted from the {inspection.layout} layout.",
        "",
        *(f"- {what}: {value}" for what, value in facts.items()),
        "",
    ]
    if not deployable(inspection):
        open_ = ", ".join(d.about for d in inspection.doubts if d.chosen is None)
        lines += [f"Not ready to be served: {open_} must be settled first.", ""]
    lines += [*(f"Note: {warning}.\n" for warning in inspection.warnings)]
    lines += ["Serve it with vLLM:", "", "```"]
    lines += [f"vllm serve {target} --speculative-config '{json.dumps(spec)}'", "```", ""]
    return "\n".join(lines)
