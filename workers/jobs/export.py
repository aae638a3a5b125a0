"""Write a speculator in another tool's layout, among the run's own files."""

from __future__ import annotations

from typing import Any

from app.services.views import RunView
from speculators_core.conversion.export import export
from speculators_core.params import ExportParams
from workers.jobs.places import artifacts, cleared
from workers.reporter import Reporter


def run(run: RunView, params: ExportParams, reporter: Reporter) -> dict[str, Any]:
    place = cleared(artifacts(run) / params.format)
    return export(params, place, reporter).model_dump(mode="json")
