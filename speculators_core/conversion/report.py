"""What is written beside converted weights: conversion_report.json and a README card.

Neither holds a path of the machine that converted, so the directory can be given away.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from speculators_core.conversion.facts import TITLES, facts_of
from speculators_core.conversion.plan import Doubt, Inspection, Plan
from speculators_core.conversion.source import Source
from speculators_core.conversion.target import REPORT
from speculators_core.models.verifier_config import VerifierFacts

_STITCHED = "an MTP head is served inside its verifier: put it there with speclab stitch-mtp"


class Validation(BaseModel):
    """Whether the written draft works on its verifier.

    `ok` None: it was not judged, for the reason in `note`. `first_token_acceptance` in 0..1, None
    where it was not measured. `failed` names the checks that failed, in words.
    """

    model_config = ConfigDict(frozen=True)

    ok: bool | None
    first_token_acceptance: float | None
    failed: list[str] = []
    note: str | None = None


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
        "deployable": deployable(inspection, validation),
    }
    (directory / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    card = _card(name, plan, verifier, validation, inspection)
    (directory / "README.md").write_text(card, encoding="utf-8")


def deployable(inspection: Inspection, validation: Validation) -> bool:
    """Whether every doubt is settled, no check failed, and the result is served by itself."""
    return not obstacles(inspection, validation)


def obstacles(inspection: Inspection, validation: Validation) -> list[str]:
    """What stands between the result and being served, in words."""
    open_ = [f"{d.about} must be settled first" for d in inspection.doubts if d.chosen is None]
    inside = [_STITCHED] if inspection.layout == "mtp" else []
    return open_ + inside + validation.failed


def _card(
    name: str, plan: Plan, verifier: VerifierFacts, validation: Validation, inspection: Inspection
) -> str:
    config = plan.config
    target = Path(verifier.path).name
    spec: dict[str, Any] = {"model": name, "method": config.algorithm}
    spec["num_speculative_tokens"] = config.speculative_tokens
    accepted = validation.first_token_acceptance
    facts = {
        "Verifier": f"{target} ({verifier.num_hidden_layers} layers, H {verifier.hidden_size})",
        **facts_of(config),
        "First-token acceptance": "not measured" if accepted is None else f"{accepted:.3f}",
    }
    lines = [
        "---",
        "library_name: speculators",
        f"tags: [{config.algorithm}, speculative-decoding, speculators]",
        "---",
        f"# {name}",
        "",
        f"{TITLES[config.algorithm]} for {target}, converted from the {inspection.layout} layout.",
        "",
        *(f"- {what}: {value}" for what, value in facts.items()),
        "",
    ]
    lines += [f"Not ready to be served: {why}.\n" for why in obstacles(inspection, validation)]
    lines += [*(f"Note: {warning}.\n" for warning in inspection.warnings)]
    lines += ["Serve it with vLLM:", "", "```"]
    lines += [f"vllm serve {target} --speculative-config '{json.dumps(spec)}'", "```", ""]
    return "\n".join(lines)
