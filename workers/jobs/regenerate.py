"""Answers of the verifier to given questions, registered as training chats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.services import data_sets, verifiers
from app.services.views import RunView
from speculators_core.data.endpoint import URL, is_loopback, is_operators
from speculators_core.data.regenerate import regenerate
from speculators_core.errors import Forbidden
from speculators_core.params import RegenerateParams
from workers.jobs.places import artifacts, name_of, output_name
from workers.reporter import Reporter

_SAMPLING = {"temperature", "top_p", "max_tokens", "enable_thinking", "seed"}


def run(run: RunView, params: RegenerateParams, reporter: Reporter) -> dict[str, Any]:
    if params.endpoint and not (is_loopback(params.endpoint) or is_operators(params.endpoint)):
        raise Forbidden(
            "a run may ask only this lab's own deployments and the operator's endpoint",
            where=params.endpoint,
            hint=f"the operator names it as {URL} in the worker's environment",
        )
    result = regenerate(params, artifacts(run) / "regenerated", reporter)  # an attempt goes on
    verifier = reporter.insist(lambda: name_of(params.verifier, verifiers.list_verifiers()))
    facts = {
        "verifier": verifier,
        "of": Path(params.data).stem,
        **params.model_dump(mode="json", include=_SAMPLING),
        **result.model_dump(mode="json", include={"tokens", "failed", "cut", "skipped", "model"}),
    }
    reporter.insist(
        lambda: data_sets.register(
            result.output,
            output_name(run, f"{Path(params.data).stem}-regenerated"),
            "chats",
            samples=result.samples,
            facts=facts,
            run_id=run.id,
        )
    )
    return result.model_dump(mode="json")
