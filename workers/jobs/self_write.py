"""Chats that the verifier writes itself, registered as training chats and held-out prompts."""

from __future__ import annotations

from typing import Any

from app.services import data_sets, verifiers
from app.services.views import RunView
from speculators_core.data.self_write import self_write
from speculators_core.params import SelfWriteParams
from workers.jobs.places import artifacts, cleared, name_of, output_name
from workers.reporter import Reporter


def run(run: RunView, params: SelfWriteParams, reporter: Reporter) -> dict[str, Any]:
    result = self_write(params, cleared(artifacts(run) / "self-written"), reporter)
    verifier = reporter.insist(lambda: name_of(params.verifier, verifiers.list_verifiers()))
    name = output_name(run, f"self-written-{params.domain}")
    facts = {"verifier": verifier, "domain": params.domain, "seed": params.seed}
    reporter.insist(
        lambda: data_sets.register(
            result.output,
            name,
            "chats",
            samples=result.samples,
            facts={**facts, "tokens": result.tokens, "dropped": result.dropped},
            run_id=run.id,
        )
    )
    if params.held_out:
        reporter.insist(
            lambda: data_sets.register(
                result.held_out,
                f"{name}-held-out",
                "prompts",
                samples=params.held_out,
                facts=facts,
                run_id=run.id,
            )
        )
    return result.model_dump(mode="json")
