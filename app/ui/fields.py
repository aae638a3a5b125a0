"""One field of a parameter model as a component: its label, help, start, and what was entered."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

import gradio as gr
from pydantic import BaseModel
from pydantic.fields import FieldInfo

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
    "seq_length": "Cut samples at",
    "draft_vocab_size": "Draft vocabulary",
    "validation_fraction": "Validation share",
    "start_from": "Start from",
    "verifier_name": "Verifier's hub id",
    "gpus": "GPUs",
    "held_out": "Held-out prompts",
    "evaluate_every": "Measure every",
    "evaluate_prompts": "Prompts of a measurement",
    "evaluate_tokens": "Tokens of a measurement",
    "compile": "Compile (torch.compile)",
    "autocast": "Autocast of the draft",
    "states_dtype": "Number format of the states",
}
TRISTATE: dict[str, bool | None] = {"default": None, "yes": True, "no": False}
TRISTATE_OF = {value: word for word, value in TRISTATE.items()}
REFERENCES = ("verifier", "speculator", "checkpoint", "start_from")
"""Text fields that offer what is registered, and take anything else."""


def component(
    model: type[BaseModel],
    name: str,
    value: Any,
    choices: Sequence[str] | None,
    ids: str = "field",
) -> Any:
    """The component of one field; `ids` begins its element's id. A field of several values that
    has choices offers them all.
    """
    field = model.model_fields[name]
    kind = kind_of(field.annotation)
    start = shown(field, value if value is not None else default(field))
    common = {
        "label": label(name),
        "info": _help(field),
        "elem_id": f"{ids}-{name.replace('_', '-')}",
        "min_width": 260 if name in REFERENCES or choices is not None else 180,
    }
    if kind is bool and not takes_none(field):
        return gr.Checkbox(value=start, **common)
    if kind is bool or get_origin(kind) is Literal:
        offered = list(TRISTATE) if kind is bool else [str(v) for v in get_args(kind)]
        open_ = [("default", "")] if takes_none(field) and kind is not bool else []
        return gr.Dropdown([*open_, *offered], value=start, **common)
    if choices is not None and kind is tuple:
        return gr.Dropdown(list(choices), multiselect=True, allow_custom_value=True, **common)
    if choices is not None or name in REFERENCES:
        return gr.Dropdown(
            list(choices or ()), value=start or None, allow_custom_value=True, **common
        )
    # Numbers too: `1e-3` stays as it was written, and an empty field means "none".
    placeholder = shown(field, default(field)) or None
    return gr.Textbox(value=start, placeholder=placeholder, max_lines=1, **common)


def label(name: str) -> str:
    """`tokens_per_batch` reads `Tokens per batch`."""
    return LABELS.get(name, name.replace("_", " ").capitalize())


def parse(field: FieldInfo, value: Any) -> Any:
    """What a person entered as what the model takes; None for an empty field."""
    if isinstance(value, str):
        value = value.strip()
    if value is None or value == "" or value == []:
        return None
    kind = kind_of(field.annotation)
    if kind is bool and isinstance(value, str):
        return TRISTATE.get(value, value)
    if kind is tuple and isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def from_address(model: type[BaseModel], name: str, given: str) -> Any:
    """What a field holds that the page's address names: `True` and `false` as words, too; nothing
    is None.
    """
    field = model.model_fields[name]
    if not given:
        return shown(field, None)
    if kind_of(field.annotation) is not bool:
        return given
    yes = given.lower() in ("true", "yes", "1")
    return TRISTATE_OF[yes] if takes_none(field) else yes


def sentence(error: Mapping[str, Any], field: FieldInfo | None = None) -> str:
    """A validation error as a sentence that shows what was found; a field that has a form of its
    own is told by its description.
    """
    if error["type"] in ("missing", "string_too_short"):
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
    if field and field.description:
        rules["string_pattern_mismatch"] = f"must be: {_help(field)}"
    rule = rules.get(error["type"], str(error["msg"]).removeprefix("Value error, "))
    found = error.get("input")
    shown = "" if isinstance(found, dict) else f", found {found!r}"
    text = f"{rule[:1].upper()}{rule[1:]}{shown}"
    return text if text.endswith(".") else text + "."


def default(field: FieldInfo) -> Any:
    return None if field.is_required() else field.get_default()


def _help(field: FieldInfo) -> str:
    text = field.description or ""
    if text.startswith("`"):  # a value, to be typed as it stands
        return text.replace("`", "")
    return (text[:1].upper() + text[1:]).replace("`", "")


def shown(field: FieldInfo, value: Any) -> Any:
    """A value as its component holds it."""
    kind = kind_of(field.annotation)
    if kind is bool:
        return TRISTATE_OF[value] if takes_none(field) else bool(value)
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        return ",".join(str(part) for part in value)
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return str(value)


def takes_none(field: FieldInfo) -> bool:
    return not field.is_required() and type(None) in get_args(field.annotation)


def kind_of(annotation: Any) -> Any:
    """The plain type behind Annotated and Optional: bool, int, float, str, tuple or a Literal."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return kind_of(next(a for a in get_args(annotation) if a is not type(None)))
    if origin is Literal:
        return annotation
    if hasattr(annotation, "__metadata__"):
        return kind_of(annotation.__origin__)
    return origin or annotation
