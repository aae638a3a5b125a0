"""Forms made from the parameter models: label, help, default and check are written once, there.

A `Form` draws the chosen fields of one job kind, turns what is in them into parameters, and says
beside a field what is wrong with it.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

import gradio as gr
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from app.ui.commands import submit_line
from app.ui.components import state
from app.ui.components.elements import Node
from app.ui.page import QUIET
from speculators_core.errors import InputError
from speculators_core.params import JobKind

LABELS = {
    "lr": "Learning rate",
    "ttt_steps": "TTT steps",
    "ttt_step_loss_decay": "Loss decay per step",
    "speculative_tokens": "Speculative tokens (K)",
    "num_layers": "Draft layers",
    "norm_before_fc": "Norm before fc",
    "fc_norm": "Norm per state (fc_norm)",
    "lm_head_from_verifier": "Start lm_head from the verifier",
    "top_p": "Top-p",
    "top_k": "Top-k",
    "max_num_seqs": "Requests at once",
    "max_model_len": "Longest context",
    "dtype": "Number format",
    "trace": "Trace every step",
    "data": "Data",
}
TRISTATE: dict[str, bool | None] = {"default": None, "yes": True, "no": False}
TRISTATE_OF = {value: word for word, value in TRISTATE.items()}
REFERENCES = ("verifier", "speculator", "checkpoint")
"""Text fields that offer what is registered, and take anything else."""
ALL_AS_JSON = "(...values) => JSON.stringify(values)"


class Form:
    """Some fields of a parameter model as Gradio components, in the order given. `nothing`: a
    choice that stands for an empty field, in words.
    """

    def __init__(
        self,
        model: type[BaseModel],
        preset: Mapping[str, Any] | None = None,
        nothing: str | None = None,
    ) -> None:
        self.model = model
        self.preset = dict(preset or {})
        self.nothing = nothing
        self.fields: dict[str, gr.components.FormComponent] = {}

    def draw(self, *names: str, choices: Mapping[str, Sequence[str]] | None = None) -> None:
        """Place these fields here."""
        for name in names:
            offered = (choices or {}).get(name)
            self.fields[name] = component(self.model, name, self.preset.get(name), offered)

    @property
    def inputs(self) -> list[Any]:
        return list(self.fields.values())

    def params(self, entered: Sequence[Any], **extra: Any) -> BaseModel:
        """What is in the fields, checked; `extra` adds to it. Raises an `InputError`."""
        try:
            return self.model.model_validate({**self.preset, **self.values(entered), **extra})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = label(_field(first)) if _field(first) else "The form"
            raise InputError(f"{name}: {sentence(first)}", hint="correct this field") from error

    def values(self, entered: Sequence[Any]) -> dict[str, Any]:
        """What is in the fields as parameters; an empty field means the model's default."""
        found = {}
        for name, value in zip(self.fields, entered, strict=True):
            given = None if self.nothing and value == self.nothing else value
            parsed = parse(self.model.model_fields[name], given)
            if parsed is not None or _takes_none(self.model.model_fields[name]):
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
            return {_field(e): sentence(e) for e in reversed(error.errors(include_url=False))}
        return {}

    def marks(self, entered: Sequence[Any], **extra: Any) -> list[Any]:
        """For each field whether it is right, and the sentence beside it if not."""
        wrong = self.problems(entered, **extra)
        return [gr.validate(name not in wrong, wrong.get(name, "")) for name in self.fields]

    def validator(self) -> Callable[..., list[Any]]:
        """For an event whose inputs are this form's."""
        return lambda *entered: self.marks(entered)

    def entered(self, values: Mapping[str, Any]) -> list[Any]:
        """What the fields hold when these values are chosen, defaults for the rest."""
        fields = self.model.model_fields
        chosen = {name: values.get(name, _default(fields[name])) for name in self.fields}
        return [_shown(fields[name], value) for name, value in chosen.items()]

    def _by_name(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return dict(zip(self.fields, self.entered(values), strict=True))

    def show_command(self, panel: Any, kind: JobKind, blocks: gr.Blocks) -> None:
        """Keep `panel` showing the command line that does what the form would.

        The fields reach the server through a hidden one: an event that takes the fields themselves
        wipes what stands beside them when it comes back, also a sentence that is newer than it.
        """
        entered = gr.Textbox(visible="hidden", show_label=False)

        def line(values: str) -> Node:
            chosen = self.values(json.loads(values))
            return state.command(submit_line(kind, {**self.preset, **chosen}))

        changes = [field.change for field in self.fields.values()]
        gr.on([blocks.load, *changes], None, self.inputs, entered, js=ALL_AS_JSON, queue=False)
        entered.change(line, entered, panel, trigger_mode="always_last", **QUIET)

    def open_with(self, blocks: gr.Blocks, choices: Mapping[str, Callable[[], list[str]]]) -> None:
        """When the page opens: fill in what is registered by now, and what the address names
        (`/deploy?speculator=NAME`)."""
        names = list(choices)

        def opened(request: gr.Request) -> Any:
            given = request.query_params
            known = {name: choices[name]() for name in names}
            updates = [
                _offering(found, given.get(name) or next(iter(found), None))
                for name, found in known.items()
            ]
            return updates if len(updates) > 1 else updates[0]  # Gradio takes a list for a value

        blocks.load(opened, None, [self.fields[name] for name in names], **QUIET)


def _offering(found: Sequence[str], value: str | None) -> Any:
    """Choices, and the first of them; where there is none, what was typed meanwhile stays."""
    return gr.Dropdown(choices=found, value=value) if value else gr.Dropdown(choices=found)


def component(model: type[BaseModel], name: str, value: Any, choices: Sequence[str] | None) -> Any:
    """The component of one field."""
    field = model.model_fields[name]
    kind = _kind(field.annotation)
    start = _shown(field, value if value is not None else _default(field))
    common = {
        "label": label(name),
        "info": _help(field),
        "elem_id": f"field-{name.replace('_', '-')}",
        "min_width": 260 if name in REFERENCES else 150,
    }
    if kind is bool and not _takes_none(field):
        return gr.Checkbox(value=start, **common)
    if kind is bool or get_origin(kind) is Literal:
        offered = list(TRISTATE) if kind is bool else [str(v) for v in get_args(kind)]
        return gr.Dropdown(offered, value=start, **common)
    if choices is not None or name in REFERENCES:
        return gr.Dropdown(
            list(choices or ()), value=start or None, allow_custom_value=True, **common
        )
    # Numbers too: `1e-3` stays as it was written, and an empty field means "none".
    return gr.Textbox(value=start, max_lines=1, **common)


def label(name: str) -> str:
    """`tokens_per_batch` reads `Tokens per batch`."""
    return LABELS.get(name, name.replace("_", " ").capitalize())


def parse(field: FieldInfo, value: Any) -> Any:
    """What a person entered as what the model takes; None for an empty field."""
    if isinstance(value, str):
        value = value.strip()
    if value is None or value == "" or value == []:
        return None
    kind = _kind(field.annotation)
    if kind is bool and isinstance(value, str):
        return TRISTATE.get(value, value)
    if kind is tuple and isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def sentence(error: Mapping[str, Any]) -> str:
    """A validation error as a sentence that shows what was found."""
    if error["type"] == "missing":
        return "This is needed."
    context = error.get("ctx", {})
    rules = {
        "greater_than_equal": f"must be at least {context.get('ge')}",
        "greater_than": f"must be more than {context.get('gt')}",
        "less_than_equal": f"must be at most {context.get('le')}",
        "less_than": f"must be less than {context.get('lt')}",
        "int_parsing": "must be a whole number",
        "float_parsing": "must be a number",
    }
    rule = rules.get(error["type"], str(error["msg"]).removeprefix("Value error, "))
    found = error.get("input")
    shown = "" if isinstance(found, dict) else f", found {found!r}"
    text = f"{rule[:1].upper()}{rule[1:]}{shown}"
    return text if text.endswith(".") else text + "."


def _field(error: Mapping[str, Any]) -> str:
    return str(error["loc"][0]) if error["loc"] else ""


def _default(field: FieldInfo) -> Any:
    return None if field.is_required() else field.get_default()


def _help(field: FieldInfo) -> str:
    text = (field.description or "").replace("`", "")
    return text[:1].upper() + text[1:]


def _shown(field: FieldInfo, value: Any) -> Any:
    """A value as its component holds it."""
    kind = _kind(field.annotation)
    if kind is bool:
        return TRISTATE_OF[value] if _takes_none(field) else bool(value)
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        return ",".join(str(part) for part in value)
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return str(value)


def _takes_none(field: FieldInfo) -> bool:
    return not field.is_required() and type(None) in get_args(field.annotation)


def _kind(annotation: Any) -> Any:
    """The plain type behind Annotated and Optional: bool, int, float, str, tuple or a Literal."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return _kind(next(a for a in get_args(annotation) if a is not type(None)))
    if origin is Literal:
        return annotation
    if hasattr(annotation, "__metadata__"):
        return _kind(annotation.__origin__)
    return origin or annotation
