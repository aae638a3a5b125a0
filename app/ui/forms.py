"""Forms made from the parameter models: label, help, default and check are written once, there.

A `Form` draws the chosen fields of one job kind, turns what is in them into parameters, and says
beside a field what is wrong with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gradio as gr
from pydantic import ValidationError

from app.ui.commands import submit_line
from app.ui.components import state
from app.ui.components.corrections import Correction
from app.ui.components.elements import Node
from app.ui.fields import (
    component,
    default,
    from_address,
    label,
    parse,
    sentence,
    shown,
    takes_none,
)
from app.ui.page import QUIET
from speculators_core.errors import InputError
from speculators_core.params import JobKind, Params

ALL_AS_JSON = "(...values) => JSON.stringify(values)"


class Form:
    """Some fields of a parameter model as Gradio components, in the order given. `nothing`: a
    choice that stands for an empty field, in words; `ids`: how the ids of its elements begin.
    """

    def __init__(
        self,
        model: type[Params],
        preset: Mapping[str, Any] | None = None,
        nothing: str | None = None,
        ids: str = "field",
    ) -> None:
        self.model = model
        self.ids = ids
        self.preset = dict(preset or {})
        self.nothing = nothing
        self.fields: dict[str, gr.components.FormComponent] = {}
        self.filled: list[Any] = []
        """The events that fill it when the page opens."""

    def draw(
        self,
        *names: str,
        choices: Mapping[str, Sequence[str]] | None = None,
        start: Mapping[str, Any] | None = None,
    ) -> None:
        """Place these fields here; `start` is what stands in them at first."""
        starts = {**self.preset, **(start or {})}
        for name in names:
            offered = (choices or {}).get(name)
            self.fields[name] = component(self.model, name, starts.get(name), offered, self.ids)

    @property
    def inputs(self) -> list[Any]:
        return list(self.fields.values())

    def params(self, entered: Sequence[Any], **extra: Any) -> Params:
        """What is in the fields, checked; `extra` adds to it. Raises an `InputError`."""
        try:
            return self.model.model_validate({**self.preset, **self.values(entered), **extra})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = label(_field(first)) if _field(first) else "The form"
            raise InputError(
                f"{name}: {self._sentence(first)}", hint="correct this field"
            ) from error

    def values(self, entered: Sequence[Any]) -> dict[str, Any]:
        """What is in the fields as parameters; an empty field means the model's default."""
        found = {}
        for name, value in zip(self.fields, entered, strict=True):
            given = None if self.nothing and value == self.nothing else value
            parsed = parse(self.model.model_fields[name], given)
            if parsed is not None or takes_none(self.model.model_fields[name]):
                found[name] = parsed
        return found

    def changed(self, entered: Sequence[Any]) -> dict[str, Any]:
        """Of `values`, those that are not the model's defaults."""
        values = self.values(entered)
        defaults, now = self._by_name({}), self._by_name(values)
        return {name: value for name, value in values.items() if now[name] != defaults[name]}

    def holds(self, entered: Sequence[Any], wanted: Mapping[str, Any]) -> bool:
        """Whether the fields say what these parameters say."""
        values = self.values(entered)
        return self._by_name(values) == self._by_name({**values, **wanted})

    def problems(self, entered: Sequence[Any], **extra: Any) -> dict[str, str]:
        """Field name to a sentence; empty when all is well. Errors of the whole: key ''."""
        try:
            self.model.model_validate({**self.preset, **self.values(entered), **extra})
        except ValidationError as error:
            found = reversed(error.errors(include_url=False))
            return {_field(one): self._sentence(one) for one in found}
        return {}

    def _sentence(self, error: Mapping[str, Any]) -> str:
        return sentence(error, self.model.model_fields.get(_field(error)))

    def corrections(self, entered: Sequence[Any], **extra: Any) -> list[Correction]:
        """What is wrong, in the fields' order; what concerns no field of the form comes last."""
        wrong = self.problems(entered, **extra)
        names = [name for name in self.fields if name in wrong]
        rest = [name for name in wrong if name not in self.fields]
        return [self.correction(name, wrong[name]) for name in (*names, *rest)]

    def correction(self, name: str, sentence: str) -> Correction:
        field = self.fields.get(name)
        return Correction(field.elem_id if field else "", label(name) if name else "", sentence)

    def entered(self, values: Mapping[str, Any]) -> list[Any]:
        """What the fields hold when these values are chosen, defaults for the rest."""
        fields = self.model.model_fields
        chosen = {name: values.get(name, default(fields[name])) for name in self.fields}
        return [shown(fields[name], value) for name, value in chosen.items()]

    def _by_name(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return dict(zip(self.fields, self.entered(values), strict=True))

    def show_command(self, panel: Any, kind: JobKind, blocks: gr.Blocks) -> None:
        """Keep `panel` showing the command line that does what the form would."""

        def line(entered: str) -> Node:
            chosen = self.values(json.loads(entered))
            return state.command(submit_line(kind, {**self.preset, **chosen}))

        Mirror(blocks, self.inputs, self.filled).change(line, panel)

    def open_with(
        self,
        blocks: gr.Blocks,
        choices: Mapping[str, Callable[[], list[str]]],
        empty: Sequence[str] = (),
    ) -> None:
        """When the page opens: fill in what is registered by now (`empty`: offered, but nothing is
        chosen), and what the address names (`/deploy?speculator=NAME&port=8000`)."""

        def opened(request: gr.Request) -> Any:
            updates = [self._opening(name, request, choices, name in empty) for name in self.fields]
            return updates if len(updates) > 1 else updates[0]  # Gradio takes a list for a value

        self.filled.append(blocks.load(opened, None, self.inputs, **QUIET))

    def _opening(
        self,
        name: str,
        request: gr.Request,
        choices: Mapping[str, Callable[[], list[str]]],
        empty: bool,
    ) -> Any:
        """How a field opens. Where nothing is offered or named, what was typed meanwhile stays."""
        given = request.query_params.get(name)
        if name not in choices:
            return gr.skip() if given is None else from_address(self.model, name, given)
        found = choices[name]()
        value = given or (None if empty else next(iter(found), None))
        if not value:
            return gr.Dropdown(choices=found)
        several = getattr(self.fields[name], "multiselect", False)
        return gr.Dropdown(choices=found, value=[value] if several else value)


class Mirror:
    """Fields as one hidden text, JSON, from the page's opening on and after every change: what
    follows them is worked out once for all changes that come together.

    `filled`: events that fill the fields when the page opens, which fields of a folded part don't
    tell as a change.
    """

    def __init__(self, blocks: gr.Blocks, inputs: Sequence[Any], filled: Sequence[Any]) -> None:
        self._text = gr.Textbox(show_label=False, container=False, elem_classes="sl-hidden")
        events = [blocks.load, *(field.change for field in inputs)]
        gr.on(events, None, list(inputs), self._text, js=ALL_AS_JSON, queue=False)
        for event in filled:
            event.then(None, list(inputs), self._text, js=ALL_AS_JSON, queue=False)

    def change(self, work: Callable[[str], Any], outputs: Any) -> None:
        """Show what `work` makes of them; only of the latest, however fast they change."""
        self._text.change(work, self._text, outputs, trigger_mode="always_last", **QUIET)


def _field(error: Mapping[str, Any]) -> str:
    return str(error["loc"][0]) if error["loc"] else ""
