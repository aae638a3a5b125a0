"""The command line, or the file, that says what a form or a run does."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from app.ui.components.elements import Node, el
from speculators_core.params import PARAMS_OF, JobKind, Params


def submit_line(kind: JobKind, params: Mapping[str, Any]) -> str:
    """`speclab submit KIND --flag value …` with what differs from the defaults."""
    words = ["speclab", "submit", kind.value.replace("_", "-")]
    for name, value in params.items():
        field = PARAMS_OF[kind].model_fields.get(name)
        if field is not None and not _same(value, _plain(field.get_default())):
            words += _flag(name, value)
    return shlex.join(words)


def yaml_tree(params: Params) -> Node:
    """All of the training's parameters as a file, folded."""
    text = yaml_text(type(params), params.model_dump(mode="json"))
    return el(
        "details",
        el("summary", "Same as YAML"),
        el(
            "div",
            el(
                "p",
                "For ",
                el("code", "speclab train --config FILE --output DIR"),
                " here, or for ",
                el("code", "speclab submit train --config FILE"),
                " in the lab's queue.",
            ),
            el("pre", text, cls="raw"),
            el("div", el("button", "Copy", cls="button small", data_copy=text, type="button")),
            cls="stack",
        ),
        cls="yaml",
    )


def yaml_text(model: type[BaseModel], params: Mapping[str, Any]) -> str:
    """All parameters as YAML that `--config FILE` takes, each with its line of explanation."""
    fields = model.model_fields
    return "".join(
        _yaml_line(name, params[name], fields[name]) for name in fields if name in params
    )


def _yaml_line(name: str, value: Any, field: FieldInfo) -> str:
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, allow_unicode=True, width=10_000)
    bare = text.removesuffix("...\n").rstrip()  # how YAML ends a lone scalar
    return f"{name}: {bare}  # {field.description or name}\n"


def _flag(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if value is None:
        return [flag, "none"]
    if isinstance(value, bool):
        return [flag if value else "--no-" + flag[2:]]
    if isinstance(value, (list, tuple)):
        return [flag, ",".join(str(part) for part in value)]
    return [flag, str(value)]


def _same(value: Any, default: Any) -> bool:
    """Also of what a form holds, which is text: `1` is 1.0."""
    try:
        return float(value) == float(default)
    except (TypeError, ValueError):
        return str(value) == str(default)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
