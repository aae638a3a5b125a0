"""Chats to a prepared data set, kept under a key of what it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.services import data_sets, verifiers
from app.services.views import RunView
from app.settings import settings
from speculators_core.data.prepare import prepare, prepared_key
from speculators_core.params import PrepareParams
from workers.jobs.places import name_of, output_name
from workers.reporter import Reporter

_KEY = 24  # characters of it name the directory


def run(run: RunView, params: PrepareParams, reporter: Reporter) -> dict[str, Any]:
    key = prepared_key(params, reporter)[:_KEY]
    result = prepare(params, settings().home / "datasets" / key, reporter)
    verifier = reporter.insist(lambda: name_of(params.verifier, verifiers.list_verifiers()))
    facts = result.model_dump(mode="json", exclude={"output", "samples"})
    reporter.insist(
        lambda: data_sets.register(
            result.output,
            output_name(run, f"{Path(params.data[0]).stem}-prepared"),
            "prepared",
            samples=result.samples,
            facts={
                **facts,
                "verifier": verifier,
                "seq_length": params.seq_length,
                "enable_thinking": params.enable_thinking,
            },
            run_id=run.id,
        )
    )
    return result.model_dump(mode="json")
