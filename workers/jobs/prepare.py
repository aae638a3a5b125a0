"""Chats to a prepared data set, kept under a key of what it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.services import data_sets, verifiers
from app.services.data_sets import content_digest
from app.services.views import RunView
from app.settings import settings
from speculators_core.data.prepare import prepare
from speculators_core.errors import DataError
from speculators_core.models.verifier_config import read_verifier
from speculators_core.params import PrepareParams
from workers.jobs.places import content_key, name_of, output_name
from workers.reporter import Reporter


def run(run: RunView, params: PrepareParams, reporter: Reporter) -> dict[str, Any]:
    result = prepare(params, settings().home / "datasets" / _key(params), reporter)
    verifier = reporter.insist(lambda: name_of(params.verifier, verifiers.list_verifiers()))
    facts = result.model_dump(mode="json", exclude={"output", "samples"})
    reporter.insist(
        lambda: data_sets.register(
            result.output,
            output_name(run, f"{Path(params.data[0]).stem}-prepared"),
            "prepared",
            samples=result.samples,
            facts={**facts, "verifier": verifier, "seq_length": params.seq_length},
            run_id=run.id,
        )
    )
    return result.model_dump(mode="json")


def _key(params: PrepareParams) -> str:
    """Equal for equal data, tokenizer and parameters, whatever the paths are."""
    for file in params.data:
        if not Path(file).is_file():
            raise DataError(
                "there is no such file of chats", where=file, hint="give a JSONL file of `messages`"
            )
    rest = params.model_dump(mode="json", exclude={"data", "verifier"})
    return content_key(
        {
            **rest,
            "data": [content_digest(Path(file)) for file in params.data],
            "verifier": read_verifier(params.verifier).tokenizer_fingerprint,
        }
    )
