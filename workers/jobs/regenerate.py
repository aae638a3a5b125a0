"""Answers of the verifier to given questions, registered as training chats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.services import data_sets, deployments, verifiers
from app.services.views import RunView
from speculators_core.data.endpoint import URL, is_operators, same_server
from speculators_core.data.regenerate import regenerate
from speculators_core.errors import Forbidden
from speculators_core.params import RegenerateParams
from workers.jobs.places import artifacts, name_of, output_name
from workers.reporter import Reporter

_SAMPLING = {"temperature", "top_p", "max_tokens", "enable_thinking", "seed"}


def run(run: RunView, params: RegenerateParams, reporter: Reporter) -> dict[str, Any]:
    if params.endpoint and not is_operators(params.endpoint):
        _require_deployment(params.endpoint, run.host, reporter)
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


def _require_deployment(endpoint: str, host: str | None, reporter: Reporter) -> None:
    """Raise `Forbidden` unless a deployment that runs on this host answers at the endpoint."""
    running = reporter.insist(lambda: deployments.list_deployments(active_only=True))
    here = [one for one in running if one.endpoint and one.host == host]
    if any(one.endpoint and same_server(one.endpoint, endpoint) for one in here):
        return
    found = ", ".join(f"{one.endpoint} ({one.name})" for one in here)
    raise Forbidden(
        "a run may ask only a deployment of this lab on its own machine, or the operator's "
        f"endpoint; found there: {found or 'no deployment that runs'}",
        where=endpoint,
        hint="choose one of those, or start a deployment; the operator names another server as "
        f"{URL} in the worker's environment",
    )
