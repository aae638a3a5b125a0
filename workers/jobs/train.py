"""Train a speculator; a run that is started again goes on from its last checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.services import speculators, verifiers
from app.services.views import RunView
from speculators_core.params import TrainParams
from speculators_core.training.train import train
from workers.jobs.places import artifacts, name_of, output_name, speculator_directory
from workers.reporter import Reporter


def run(run: RunView, params: TrainParams, reporter: Reporter) -> dict[str, Any]:
    name = output_name(run, f"{Path(params.verifier).name}-eagle3")
    checkpoints = artifacts(run) / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    result = train(params, speculator_directory(name, run), reporter, resume=checkpoints)
    verifier = reporter.insist(lambda: name_of(params.verifier, verifiers.list_verifiers()))
    registered = reporter.insist(
        lambda: speculators.register(result.output, name, verifier=verifier, run_id=run.id)
    )
    return {**result.model_dump(mode="json"), "name": registered.name}
