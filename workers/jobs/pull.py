"""Download a repository of the hub and register what it is: a speculator or a verifier. A draft in
another layout is left to be converted.
"""

from __future__ import annotations

from typing import Any

from app.services import speculators, verifiers
from app.services.views import RunView
from speculators_core.hub.pull import pull
from speculators_core.params import PullParams
from workers.jobs.places import slug
from workers.reporter import Reporter


def run(run: RunView, params: PullParams, reporter: Reporter) -> dict[str, Any]:
    found = pull(params, reporter)
    reporter.note(f"{found.repository} at commit {found.revision}: a {found.what}")
    name = slug(params.name or found.repository.partition("/")[2])
    pinned = f"{found.repository}@{found.revision}"
    result = found.model_dump(mode="json")
    if found.what == "checkpoint":
        reporter.note(f"convert it: speclab submit convert --checkpoint {pinned}")
        return result
    if found.what == "speculator":
        registered = reporter.insist(
            lambda: (
                speculators.register(
                    found.output,
                    name,
                    deployable=not found.doubts,
                    doubts=result["doubts"],
                    run_id=run.id,
                ).name
            )
        )
    else:
        registered = reporter.insist(
            lambda: verifiers.register(found.output, name, source=pinned, run_id=run.id).name
        )
    return {**result, "name": registered}
