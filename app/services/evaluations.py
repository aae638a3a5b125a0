"""Finished evaluations: headline numbers to sort by, the whole report to show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import select

from app.services.views import EvaluationView
from app.store.engine import reading, serialise, writing
from app.store.models import Evaluation
from speculators_core.errors import NotFound
from speculators_core.params import EvaluateParams


def list_evaluations(speculator: str | None = None, limit: int = 200) -> list[EvaluationView]:
    """Newest first; of one speculator (as it was named to the evaluation), or of all."""
    query = select(Evaluation).order_by(Evaluation.created_at.desc()).limit(limit)
    with reading() as session:
        rows = session.scalars(
            query.where(Evaluation.speculator == speculator) if speculator else query
        )
        return [EvaluationView.model_validate(row) for row in rows]


def get(evaluation_id: str) -> EvaluationView:
    """Raises `NotFound`."""
    with reading() as session:
        row = session.get(Evaluation, evaluation_id)
    if row is None:
        raise NotFound(f"there is no evaluation {evaluation_id!r}")
    return EvaluationView.model_validate(row)


def register(
    params: EvaluateParams, report: Mapping[str, Any], *, run_id: str | None = None
) -> EvaluationView:
    """Keep the report of an evaluation (the JSON of `speclab evaluate`).

    `params` name speculator, verifier and data as people should see them. A run has one
    evaluation: registering again replaces its numbers.
    """
    values = {
        "speculator": params.speculator,
        "verifier": params.verifier,
        "data": params.data,
        "engine": params.engine,
        "speculative_tokens": params.speculative_tokens,
        "temperature": params.temperature,
        "acceptance_length": report["acceptance_length"],
        "acceptance_rate": report["acceptance_rate"],
        "tokens_per_second": report["tokens_per_second"],
        "tokens_per_second_plain": report.get("tokens_per_second_plain"),
        "report": dict(report),
    }
    with writing() as session:
        row = None
        if run_id is not None:
            serialise(session, f"evaluation of {run_id}")
            row = session.scalar(select(Evaluation).where(Evaluation.run_id == run_id))
        row = row or Evaluation(run_id=run_id)
        for field, value in values.items():
            setattr(row, field, value)
        session.add(row)
        session.flush()
        return EvaluationView.model_validate(row)
