"""The base of everything that Speclab draws itself.

Gradio evaluates an interpolated template as a JavaScript template literal, so text with `${…}`
in it would run. Here the template is a constant, data travels as one JSON string, and the
component's script reads it through `watch` and writes `textContent`.
"""

from __future__ import annotations

import json
from abc import ABCMeta
from pathlib import Path
from typing import Any, ClassVar

import gradio as gr
from gradio.component_meta import ComponentMeta, updateable


class _WithoutStub(ComponentMeta):  # type: ignore[misc]
    """Gradio's own metaclass also writes a `.pyi` beside the source of each component, which type
    checkers would then read instead of the source."""

    def __new__(cls, name: str, bases: tuple[type, ...], attrs: dict[str, Any]) -> Any:
        if "__init__" in attrs:
            attrs["__init__"] = updateable(attrs["__init__"])
        return ABCMeta.__new__(cls, name, bases, attrs)


class Live(gr.HTML, metaclass=_WithoutStub):  # type: ignore[misc]
    """A component whose value is any JSON data and whose look is drawn by the script beside it."""

    SCRIPT: ClassVar[str]
    """File name of the component's script, in this folder."""
    ROOT: ClassVar[str] = "sl-live"
    """Class of the element that the script fills."""

    def __init__(self, value: Any = None, **options: Any) -> None:
        super().__init__(
            value,
            html_template=f'<div class="{self.ROOT}"></div>',
            css_template="",
            js_on_load=script(self.SCRIPT),
            apply_default_css=False,
            **options,
        )

    def get_block_name(self) -> str:
        return "html"

    def postprocess(self, value: Any) -> str | None:
        """To one opaque JSON string: Gradio neither walks into it nor takes parts for files."""
        return None if value is None else encode(value)

    def preprocess(self, payload: Any) -> Any:
        return None


def encode(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


def script(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
