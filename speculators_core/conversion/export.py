"""A speculator in the layouts that other tools read: research (SafeAILab/EAGLE) and SpecForge.

Tensors keep their bytes and change their names; config fields are said in the layout's words. What
a layout has no words for is a loss, named in the result. A loss after which the layout's own
readers would compute something else is refused, unless the person accepts it: then the switch is
written as a further key, which `speclab convert` reads and they ignore. Light: no torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from speculators_core.config import Eagle3Config
from speculators_core.conversion.card import card
from speculators_core.conversion.coverage import known_coverage
from speculators_core.conversion.digest import Digests
from speculators_core.conversion.exported import (
    LAYOUTS,
    ExportLayout,
    layout_config,
    layout_name,
)
from speculators_core.conversion.facts import TITLES, facts_of
from speculators_core.conversion.losses import Loss, losses_of, precision_losses
from speculators_core.conversion.source import Source, open_source
from speculators_core.errors import InputError, Stopped
from speculators_core.hub.headers import small_files
from speculators_core.launch import (
    EXPORT_REPORT,
    Commands,
    Served,
    at_hand,
    knows_aux_layers,
    lines,
    portable_name,
)
from speculators_core.models.verifier_config import read_verifier
from speculators_core.output import complete_or_absent
from speculators_core.params import ExportParams
from speculators_core.progress import Progress, Quiet
from speculators_core.weights import Pending, check_shapes, write_weights


class ExportResult(BaseModel):
    """What `speclab export --json` prints."""

    model_config = ConfigDict(frozen=True)

    output: str
    report: str
    format: str
    losses: list[Loss]
    commands: Commands


def export(
    params: ExportParams, output: str | Path, progress: Progress | None = None
) -> ExportResult:
    """Write the speculator at `params.speculator` to `output`, which must not exist yet.

    Raises `CheckpointError` where it is no EAGLE-3 draft in speculators format, `InputError` where
    the layout can't hold it, `Conflict` where `output` exists, `Stopped` on request; nothing is
    left behind then.
    """
    output, progress = Path(output), progress or Quiet()
    directory = Path(params.speculator)
    config = Eagle3Config.load(directory)
    layout = LAYOUTS[params.format]
    with complete_or_absent(output) as partial:
        source = open_source(directory)
        losses = _losses(params, config, source)
        _refuse(losses, layout, params)
        for loss in losses:
            progress.note(f"Not held: {loss.field} ({loss.meaning})")
        text = layout_config(config, layout).to_json()
        (partial / "config.json").write_text(text, encoding="utf-8")
        with Digests(source.files) as digests:
            _write(source, partial, progress)
            named = config.speculators_config.verifier.name_or_path
            known = portable_name(params.verifier or named)
            facts = _Facts(config, layout, losses, known, digests.wait())
        _describe(partial, output.name, directory, source, facts)
    served = Served(
        algorithm=config.algorithm,
        model=str(directory),
        verifier=at_hand(named or known),
        speculative_tokens=config.speculative_tokens,
        aux_layers_known=knows_aux_layers(config),
    )
    return ExportResult(
        output=str(output),
        report=str(output / EXPORT_REPORT),
        format=layout.name,
        losses=losses,
        commands=_commands(served, layout, output),
    )


def losses_in(params: ExportParams) -> list[Loss]:
    """What the layout would not hold of this speculator; reads configs and headers alone.

    Raises `CheckpointError` and `InputError` as `export` does, but for serious losses.
    """
    directory = Path(params.speculator)
    return _losses(params, Eagle3Config.load(directory), open_source(directory))


def _losses(params: ExportParams, config: Eagle3Config, source: Source) -> list[Loss]:
    verifier = read_verifier(small_files(params.verifier)) if params.verifier else None
    found = {name: info.shape for name, info in source.tensors.items()}
    check_shapes(found, config.tensor_shapes(), source.directory, {"embed_tokens.weight"})
    layout = LAYOUTS[params.format]
    return [*losses_of(config, layout, verifier), *precision_losses(source, config)]


def _commands(served: Served, layout: ExportLayout, output: Path) -> Commands:
    """vLLM serves the speculator as it was, SGLang what was written."""
    found = lines(served)
    exported = lines(served.model_copy(update={"model": str(output), "layout": layout.name}))
    return found.model_copy(update={"sglang": exported.sglang, "notes": exported.notes})


def _refuse(losses: list[Loss], layout: ExportLayout, params: ExportParams) -> None:
    serious = [loss for loss in losses if loss.serious]
    if serious and not params.accept_losses:
        found = "; ".join(f"{loss.field} ({loss.meaning})" for loss in serious)
        raise InputError(
            f"the {layout.name} layout can't hold {found}",
            where=params.speculator,
            hint=f"{layout.readers} would draft something else; accept_losses (--accept-losses) "
            "writes it all the same, for `speclab convert` to read back",
        )


def _write(source: Source, partial: Path, progress: Progress) -> None:
    pending = [
        Pending(
            name=layout_name(name),
            shape=info.shape,
            dtype=info.dtype,
            pieces=lambda name=name: source.pieces(name),  # type: ignore[misc]
        )
        for name, info in source.tensors.items()
    ]
    for done, name in enumerate(write_weights(partial, pending), start=1):
        progress.update(done / len(pending), f"wrote {name}")
        if progress.stopping():
            raise Stopped("the export was stopped; nothing was written")


@dataclass(frozen=True)
class _Facts:
    config: Eagle3Config
    layout: ExportLayout
    losses: list[Loss]
    verifier: str
    digests: dict[str, str]


def _describe(partial: Path, name: str, directory: Path, source: Source, facts: _Facts) -> None:
    """The report and the card; neither holds a path of this machine."""
    config, layout = facts.config, facts.layout
    served = Served(
        algorithm=config.algorithm,
        model=name,
        verifier=facts.verifier,
        speculative_tokens=config.speculative_tokens,
        aux_layers_known=knows_aux_layers(config),
        layout=layout.name,
    )
    report = {
        "layout": layout.name,
        "source": {"name": directory.name, "sha256": facts.digests},
        "tensors": {layout_name(name): name for name in sorted(source.tensors)},
        "losses": [loss.model_dump() for loss in facts.losses],
        "serving": served.model_dump(exclude={"model"}),
    }
    text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    (partial / EXPORT_REPORT).write_text(text, encoding="utf-8")
    shown = {
        "Verifier": facts.verifier,
        "Algorithm": config.algorithm,
        "Layout": f"{layout.name}, for {layout.readers}",
        **facts_of(config),
        "Coverage": known_coverage(directory) or "not known",
        "Source": ", ".join(f"{file} sha256 {value}" for file, value in facts.digests.items()),
        "Licence": "that of the speculator it was made from",
    }
    about = f"{TITLES[config.algorithm]} for {facts.verifier}, exported by Speclab."
    notes = [f"not held: {loss.field} {loss.value} ({loss.meaning})" for loss in facts.losses]
    written = card(name, about, shown, served, tags=("eagle3", "speculative-decoding"), notes=notes)
    (partial / "README.md").write_text(written, encoding="utf-8")
