"""What is written beside converted weights: conversion_report.json and a README card.

Neither holds a path of the machine that converted, so the directory can be given away.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from pydantic import BaseModel, ConfigDict

from speculators_core.conversion.card import card, licence_in
from speculators_core.conversion.coverage import Coverage
from speculators_core.conversion.facts import TITLES, facts_of
from speculators_core.conversion.plan import Doubt, DraftConfig, Inspection, Plan
from speculators_core.conversion.source import Source
from speculators_core.conversion.target import REPORT
from speculators_core.hub.reference import is_hub_id, repository_of
from speculators_core.launch import Served, knows_aux_layers, portable_name
from speculators_core.models.verifier_config import VerifierFacts

_STITCHED = "an MTP head is served inside its verifier: put it there with speclab stitch-mtp"

_NOT_HASHED = (
    "not hashed: above 1 GB and not validated, and the hub has told no hash; "
    "`speclab convert --hash-source` tells one"
)
_NOT_COVERED = (
    "not known, which share of the verifier's words the draft vocabulary holds; measured by "
    "`speclab convert --data PREPARED` on what `speclab prepare CHATS` made of answers"
)


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


@dataclass(frozen=True)
class Report:
    """All that is told of one conversion. `name` is what the result is called, `hashes` the
    SHA-256 of source files by their names, as far as they were computed, `verifier_name` what a
    person calls the verifier.
    """

    name: str
    source: Source
    plan: Plan
    verifier: VerifierFacts
    validation: Validation
    inspection: Inspection
    hashes: Mapping[str, str]
    coverage: Coverage | None = None
    verifier_name: str | None = None

    def write(self, directory: Path) -> None:
        """Write conversion_report.json and README.md into `directory`."""
        text = json.dumps(self._values(), indent=2, ensure_ascii=False) + "\n"
        (directory / REPORT).write_text(text, encoding="utf-8")
        (directory / "README.md").write_text(self._card(), encoding="utf-8")

    def _values(self) -> dict[str, Any]:
        files = {
            file.name: {"bytes": file.stat().st_size, "sha256": self.hashes.get(file.name)}
            for file in self.plan.files(self.source)
        }
        return {
            "source": {**self._origin(), "files": files, "config": self._source_config()},
            "verifier": self.verifier.model_dump(exclude={"path"}) | {"name": self._verifier()},
            **_without_paths(self.inspection.model_dump(mode="json")),
            "validation": self.validation.model_dump(mode="json"),
            "coverage": self.coverage.model_dump() if self.coverage else None,
            "deployable": deployable(self.plan.config, self.inspection, self.validation),
            "serving": self._served().model_dump(exclude={"model"}),
        }

    def _origin(self) -> dict[str, str]:
        """Where the checkpoint came from: a repository at a commit, or a folder's bare name."""
        known = repository_of(self.source.directory)
        if known is None:
            return {"name": self.source.directory.name}
        return {"name": known.repository, "revision": str(known.revision)}

    def _source_config(self) -> dict[str, Any]:
        """The config as it was found, paths in it cut to their last part."""
        return {k: _without_paths(v) for k, v in self.source.config.items()}

    def _verifier(self) -> str:
        return self.verifier_name or _portable(self.plan.config, self.verifier)

    def _served(self) -> Served:
        config = self.plan.config
        return Served(
            algorithm=config.algorithm,
            model=self.name,
            verifier=self._verifier(),
            speculative_tokens=config.speculative_tokens,
            aux_layers_known=knows_aux_layers(config),
        )

    def _card(self) -> str:
        config, verifier = self.plan.config, self._verifier()
        accepted, origin = self.validation.first_token_acceptance, self._origin()
        hashes = "; ".join(f"{file} sha256 {value}" for file, value in self.hashes.items())
        facts = {
            "Verifier": f"{verifier} ({self.verifier.num_hidden_layers} layers, "
            f"H {self.verifier.hidden_size})",
            "Algorithm": config.algorithm,
            **facts_of(config),
            "Coverage": self._coverage(),
            "Validation": self._validated(),
            "First-token acceptance": "not measured" if accepted is None else f"{accepted:.3f}",
            "Source": f"{' at commit '.join(origin.values())} ({hashes or _NOT_HASHED})",
            "Licence": self._licence(),
        }
        about = f"{TITLES[config.algorithm]} for {verifier}, "
        return card(
            self.name,
            f"{about}converted from the {self.inspection.layout} layout.",
            facts,
            self._served(),
            tags=(config.algorithm, "speculative-decoding", "speculators"),
            obstacles=obstacles(config, self.inspection, self.validation),
            notes=self.inspection.warnings,
        )

    def _validated(self) -> str:
        found = self.validation
        if found.ok is None:
            return f"none: {found.note}"
        return "succeeded" if found.ok else "failed"

    def _coverage(self) -> str:
        """Of what the verifier says, the share that the draft can propose."""
        if self.coverage is not None:
            return str(self.coverage)
        config = self.plan.config
        if getattr(config, "draft_vocab_size", None) == self.verifier.vocab_size:
            return "the whole vocabulary"
        return _NOT_COVERED

    def _licence(self) -> str:
        """What the source's own card says, which binds its conversion as well."""
        card_of_source = self.source.directory / "README.md"
        found = licence_in(card_of_source) if card_of_source.is_file() else None
        return (
            f"{found}, as its source says" if found else "not stated by its source: ask its author"
        )


def deployable(config: DraftConfig, inspection: Inspection, validation: Validation) -> bool:
    """Whether every doubt is settled, no check failed, and the result is served by itself."""
    return not obstacles(config, inspection, validation)


def obstacles(config: DraftConfig, inspection: Inspection, validation: Validation) -> list[str]:
    """What stands between the result and being served, in words."""
    open_ = [f"{d.about} must be settled first" for d in inspection.doubts if d.chosen is None]
    inside = [_STITCHED] if config.algorithm == "mtp" else []
    return open_ + inside + validation.failed


def _portable(config: DraftConfig, verifier: VerifierFacts) -> str:
    """The verifier as other people would name it: as the result's config does, where that is a
    hub id; else its folder's bare name.
    """
    block = getattr(config, "speculators_config", None)
    written = block.verifier.name_or_path if block is not None else ""
    return written if is_hub_id(written) else portable_name(verifier.path)


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_paths(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    is_path = isinstance(value, str) and value.startswith(("/", "~/", "./", "../"))
    return PurePath(value).name if is_path else value
