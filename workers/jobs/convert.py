"""Convert someone's checkpoint and register it, with what is doubtful about it."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from app.services import references, speculators, verifiers
from app.services.views import RunView
from speculators_core.conversion.convert import convert
from speculators_core.hub.reference import is_hub_id, parse_hub_id
from speculators_core.params import ConvertParams
from workers.jobs.places import name_of, output_name, speculator_directory
from workers.reporter import Reporter


def run(run: RunView, params: ConvertParams, reporter: Reporter) -> dict[str, Any]:
    given = params.checkpoint
    bare = parse_hub_id(given).repository if is_hub_id(given) else given
    name = output_name(run, PurePath(bare).name)
    place = speculator_directory(name, run)
    result = convert(params, place, reporter, roots=references.roots()).model_dump(mode="json")
    verifier = reporter.insist(lambda: name_of(params.verifier, verifiers.list_verifiers()))
    registered = reporter.insist(
        lambda: speculators.register(
            result["output"],
            name,
            verifier=verifier,
            deployable=result["deployable"],
            doubts=result["doubts"],
            failed=result["validation"].get("failed", ()),
            run_id=run.id,
        )
    )
    return {**result, "name": registered.name}
