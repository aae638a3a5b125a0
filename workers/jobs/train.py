"""Train a speculator; a run that is started again goes on where its last attempt ended."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from app.services import speculators, verifiers
from app.services.views import RunView
from app.settings import settings
from speculators_core.params import TrainParams
from speculators_core.training.extraction import make_states
from speculators_core.training.train import train
from workers import leftovers
from workers.jobs.places import artifacts, cleared, name_of, output_name
from workers.reporter import Reporter
from workers.states_server import starter


def run(run: RunView, params: TrainParams, reporter: Reporter) -> dict[str, Any]:
    name = output_name(run, f"{Path(params.verifier).name}-eagle3")
    result = _trained(run, params, reporter)
    place = settings().home / "speculators" / f"{name}-{run.id}"
    _move(Path(result["output"]), place)
    verifier = reporter.insist(lambda: name_of(params.verifier, verifiers.list_verifiers()))
    registered = reporter.insist(
        lambda: speculators.register(place, name, verifier=verifier, run_id=run.id)
    )
    return {**result, "output": str(place), "name": registered.name}


def _trained(run: RunView, params: TrainParams, reporter: Reporter) -> dict[str, Any]:
    """What training gave, `output` in the run's own directory; an attempt that had finished it
    and died right after is not repeated."""
    directory = artifacts(run)
    finished = directory / "trained.json"
    if finished.exists():
        told: dict[str, Any] = json.loads(finished.read_text())
        return told
    output = cleared(directory / "speculator")
    checkpoints = directory / "speculator.checkpoints"
    if params.hidden_states == "vllm":
        make_states(params, starter(sys.stdout.buffer, leftovers.recorder(run)), reporter)
    result = train(params, output, reporter, resume=checkpoints).model_dump(mode="json")
    draft = finished.with_suffix(".partial")
    draft.write_text(json.dumps(result))
    draft.replace(finished)
    return result


def _move(made: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    if made.exists():
        made.rename(cleared(place))
