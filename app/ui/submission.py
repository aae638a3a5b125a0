"""From a filled form to a queued run, the same way on every page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from app.services import references, runs
from app.ui.commands import submit_line
from app.ui.components.elements import Node
from app.ui.forms import Form
from app.ui.page import attempt, submitted
from speculators_core.params import JobKind, Params


def submit(
    form: Form,
    kind: JobKind,
    entered: Sequence[Any],
    user: str,
    require: Callable[[Params], None] | None = None,
) -> Node:
    """Submit what is in the fields; says where the run is, or what is wrong. `require` raises where
    the work can't be done.
    """

    def work() -> Node:
        asked = form.params(entered)
        params = asked.model_dump(mode="json")
        references.check_params(kind, params)
        if require:
            require(asked)
        run = runs.submit(kind, params, owner=user)
        return submitted(run, submit_line(run.kind, run.params))

    return attempt(work)
