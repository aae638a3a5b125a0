"""A piece of a page that the server describes as an element tree.

A click on a button (or a change of a radio button) with `data_action` calls the panel's `click`
listeners; they read `action(event)`. An element with `data_copy` copies that text, a `time` with
`data_since` (or `data_until`), in seconds since 1970, shows its age (or what is left) and keeps
counting.
"""

from __future__ import annotations

import time
from typing import Any

import gradio as gr

from app.ui.components.elements import Children, Node, el
from app.ui.components.live import Live


class Panel(Live):
    """Shows a tree; a new value patches the old one in place, so focus and selection stay."""

    SCRIPT = "panel.js"
    ROOT = "sl-panel"

    def postprocess(self, value: Any) -> str | None:
        return super().postprocess(payload(value))


def payload(tree: Children) -> dict[str, Any]:
    """What the client gets: the tree and the server's clock, against which ages are counted."""
    return {"now": time.time(), "tree": el("div", tree)}


def action(event: gr.EventData) -> tuple[str, str]:
    """The `data_action` and `data_value` of the element that was clicked."""
    data = event._data if isinstance(event._data, dict) else {}
    return str(data.get("action", "")), str(data.get("value", ""))


def notice(kind: str, text: str, *more: Node) -> Node:
    """A sentence to the reader; `kind` is `error`, `warning`, `info` or `success`."""
    role = "alert" if kind == "error" else "status"
    return el("div", el("span", text), more, cls=f"notice {kind}", role=role)
