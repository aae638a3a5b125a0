"""From a filled form to a queued run, or to what has to be corrected first, the same way on every
page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from app.services import references, runs
from app.ui.components.corrections import corrections_tree, sentence_of
from app.ui.components.elements import Node
from app.ui.components.panel import notice
from app.ui.forms import Form
from app.ui.page import problem_of, run_link
from speculators_core.errors import SpeclabError
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
        if wrong := form.corrections(entered):
            return corrections_tree(wrong)
        asked = form.params(entered)
        params = asked.model_dump(mode="json")
        references.check_params(kind, params)
        if require:
            require(asked)
        return notice("success", "Queued:", run_link(runs.submit(kind, params, owner=user)))

    return answered(work, form)


def answered(work: Callable[[], Node], *forms: Form) -> Node:
    """The answer of `work`, or why there is none."""
    try:
        return work()
    except Exception as error:
        return told(error, *forms)


def told(error: Exception, *forms: Form) -> Node:
    """An error in words; beside its field, where it names one of these forms'."""
    if isinstance(error, SpeclabError) and error.where:
        for form in forms:
            if error.where in form.fields:
                return corrections_tree([form.correction(error.where, sentence_of(error))])
    return problem_of(error)
