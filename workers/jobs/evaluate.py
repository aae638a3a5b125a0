"""Measure a speculator; its numbers become an evaluation that pages list and compare."""

from __future__ import annotations

from typing import Any

from app.services import data_sets, evaluations, speculators, verifiers
from app.services.views import RunView
from speculators_core.evaluate.evaluate import evaluate
from speculators_core.params import EvaluateParams
from workers.jobs.places import name_of
from workers.reporter import Reporter


def run(run: RunView, params: EvaluateParams, reporter: Reporter) -> dict[str, Any]:
    report = evaluate(params, reporter).model_dump(mode="json")
    kept = reporter.insist(lambda: evaluations.register(_named(params), report, run_id=run.id))
    return {**report, "evaluation_id": kept.id}


def _named(params: EvaluateParams) -> EvaluateParams:
    """The parameters as people know them: registered names instead of paths."""
    return params.model_copy(
        update={
            "speculator": name_of(params.speculator, speculators.list_speculators()),
            "verifier": name_of(params.verifier, verifiers.list_verifiers()),
            "data": name_of(params.data, data_sets.list_data_sets()),
        }
    )
