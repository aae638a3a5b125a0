"""Convert someone's draft to the files that vLLM serves, and try it on its verifier.

Tensors are streamed, one piece at a time; nothing in a pickle is run; the output directory appears
only when all of it is written and checked. What a checkpoint can't tell is a doubt, measured where
that is possible and never guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from speculators_core.conversion.coverage import check_data, coverage_on, known_coverage
from speculators_core.conversion.digest import Digests, known_digest
from speculators_core.conversion.inspect import plan_of
from speculators_core.conversion.report import ConvertResult, Report, Validation, deployable
from speculators_core.conversion.source import open_source
from speculators_core.conversion.target import REPORT
from speculators_core.conversion.write import write_tensors
from speculators_core.models.hub import bring_checkpoint, here
from speculators_core.models.verifier_config import read_verifier
from speculators_core.output import complete_or_absent
from speculators_core.params import ConvertParams
from speculators_core.progress import Portion, Progress, Quiet
from speculators_core.untrusted import check_links

_HASHED_BYTES = 1 << 30


def convert(
    params: ConvertParams,
    output: str | Path,
    progress: Progress | None = None,
    *,
    roots: Sequence[Path] | None = None,
) -> ConvertResult:
    """Write the converted draft to `output`, which must not exist yet.

    The checkpoint is a directory or a hub id, the verifier a directory; where `roots` are given,
    both lie in one of them and no file in them is a link that leaves them. Unsettled doubts make
    the result not `deployable`, they are no error. Raises `CheckpointError` for a tensor or field
    that can't be right, `PairingError` for another verifier's draft, `Forbidden` for a link out of
    the roots, `Conflict` where `output` exists, `Stopped` on request; nothing is left behind then.
    """
    output, progress = Path(output), progress or Quiet()
    with complete_or_absent(output) as partial:
        checkpoint, progress = _brought_here(params.checkpoint, progress)
        source = open_source(checkpoint, roots)
        if roots is not None:
            check_links(Path(params.verifier), roots)
        facts = read_verifier(params.verifier)
        layout, plan = plan_of(source, facts, params)
        if params.data is not None:
            check_data(params.data, facts.vocab_size)
        progress.note(f"layout {layout.name}, {len(source.tensors)} tensors")
        for warning in plan.inspection.warnings:
            progress.note(f"Warning: {warning}")
        (partial / "config.json").write_text(plan.config.to_json(), encoding="utf-8")
        validation = Validation(ok=None, first_token_acceptance=None, note="it was not asked for")
        inspection = plan.inspection
        with Digests(_hashed(plan.files(source), params)) as digests:
            write_tensors(source, plan, partial, progress, params.max_shard_size)
            measured = coverage_on(partial, params.data) if params.data else None
            if params.validate_on_verifier:
                progress.update(0.5, "starting what validates it")
                from speculators_core.conversion.trial import try_out  # needs torch

                validation, inspection = try_out(
                    partial, source, layout, facts, plan, params, progress
                )
            hashes = digests.wait()
        report = Report(
            name=output.name,
            source=source,
            plan=plan,
            verifier=facts,
            validation=validation,
            inspection=inspection,
            hashes=hashes,
            coverage=measured or known_coverage(source.directory),
            verifier_name=params.verifier_name,
        )
        report.write(partial)
    return ConvertResult(
        output=str(output),
        report=str(output / REPORT),
        validation=validation,
        deployable=deployable(plan.config, inspection, validation),
        doubts=inspection.doubts,
        warnings=inspection.warnings,
    )


def _hashed(files: Sequence[Path], params: ConvertParams) -> list[Path]:
    """The source files whose SHA-256 is told. It takes longer than copying, and hides behind
    validation: without it, unless asked for, only of what is small or hashed by the hub already.
    """
    small = sum(file.stat().st_size for file in files) <= _HASHED_BYTES
    told = params.validate_on_verifier or params.hash_source or small
    return [file for file in files if told or known_digest(file)]


def _brought_here(checkpoint: str, progress: Progress) -> tuple[Path, Progress]:
    """The checkpoint's directory, downloaded where it is a hub id, and the progress that is left
    for the conversion.
    """
    if found := here(checkpoint):
        return found, progress
    found = bring_checkpoint(checkpoint, Portion(progress, 0.0, 0.4))
    return found, Portion(progress, 0.4, 1.0)
