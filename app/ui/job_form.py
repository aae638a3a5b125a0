"""A folded form of one job kind: its main fields in rows, every other under Advanced, what it
would take, the command line, and the button that queues a run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from app.ui.commands import submit_line
from app.ui.components import state
from app.ui.components.elements import Node, el
from app.ui.components.panel import Panel
from app.ui.forms import Form, Mirror
from app.ui.page import QUIET, attempt, unfold, user_of
from app.ui.submission import submit
from speculators_core.params import PARAMS_OF, JobKind, Params

Choices = Mapping[str, Callable[[], list[str]]]


@dataclass(frozen=True)
class JobForm:
    """`key` begins the ids of its elements and opens it: `/data?form=KEY`. `choices`: what is
    offered in a field, the first of it chosen unless the field is among `empty`. `needs`: what
    the work would take, shown beside the fields; `require` raises where it can't be.
    """

    kind: JobKind
    key: str
    title: str
    button: str
    rows: Sequence[Sequence[str]]
    choices: Choices
    about: str = ""
    empty: Sequence[str] = ()
    needs: Callable[[Params], Node] | None = None
    require: Callable[[Params], None] | None = None

    def draw(self, blocks: gr.Blocks) -> Form:
        """Place it here."""
        form = Form(PARAMS_OF[self.kind], ids=self.key)
        with gr.Accordion(self.title, open=False, elem_id=f"{self.key}-form") as folded:
            if self.about:
                Panel(el("p", self.about, cls="quiet"))
            self._fields(form)
            beside = Panel(elem_id=f"{self.key}-needs")
            with gr.Row(elem_classes="sl-actions"):
                go = gr.Button(self.button, variant="primary", elem_id=self.key, scale=0)
            answer = Panel(elem_id=f"{self.key}-answer")
            command = Panel(elem_id=f"{self.key}-command")

        def queue(request: gr.Request, *entered: Any) -> Node:
            return submit(form, self.kind, entered, user_of(request), self.require)

        go.click(queue, form.inputs, answer, **QUIET)
        form.open_with(blocks, self.choices, self.empty)
        Mirror(blocks, form.inputs, form.filled).change(
            lambda text: self._beside(form, json.loads(text)), [beside, command]
        )
        unfold(blocks, folded, self.key)
        return form

    def _fields(self, form: Form) -> None:
        offered: dict[str, Sequence[str]] = dict.fromkeys(self.choices, ())
        for row in self.rows:
            with gr.Row():
                form.draw(*row, choices=offered)
        main = {name for row in self.rows for name in row}
        rest = [name for name in form.model.model_fields if name not in main]
        if rest:
            with gr.Accordion("Advanced", open=False), gr.Row():
                form.draw(*rest, choices=offered)

    def _beside(self, form: Form, entered: Sequence[Any]) -> list[Node]:
        line = state.command(submit_line(self.kind, form.values(entered)))
        if self.needs is None or form.problems(entered):
            return [el("div"), line]
        needs = self.needs
        return [attempt(lambda: needs(form.params(entered))), line]
