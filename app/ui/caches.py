"""Caches, on the Data page: how large they are, when they were used, and removing them."""

from __future__ import annotations

from collections.abc import Sequence

import gradio as gr

from app.services import caches
from app.services.caches import CacheView
from app.ui.components import state
from app.ui.components.elements import Node, el
from app.ui.components.panel import Panel, action, notice
from app.ui.page import QUIET, attempt
from speculators_core.data.capacity import in_words


def draw(blocks: gr.Blocks) -> None:
    """A folded section. Sizes are looked up when the page opens: that reads directories."""
    with gr.Accordion("Caches", open=False, elem_id="caches-form"):
        shown = Panel(elem_id="caches")
        answer = Panel(elem_id="caches-answer")

    def removed(event: gr.EventData) -> list[Node]:
        name = action(event)[1]
        return [attempt(lambda: _removed(name)), attempt(lambda: table(caches.list_caches()))]

    blocks.load(lambda: attempt(lambda: table(caches.list_caches())), None, shown, **QUIET)
    shown.click(removed, None, [answer, shown], **QUIET)


def table(found: Sequence[CacheView]) -> Node:
    """The largest first. What is in use has no button."""
    if not found:
        return state.empty("Nothing is cached. Hidden states appear here once a draft is trained.")
    rows = (
        (
            el("span", one.name, title=one.path),
            one.about,
            state.size(one.size),
            state.ago(one.used_at),
            _users(one),
            _button(one),
        )
        for one in found
    )
    headings = ["Name", "What", "#Size", "Last used", "In use by", ""]
    total = sum(one.size for one in found)
    return el(
        "div",
        el(
            "p",
            f"{in_words(total)} in all. Everything here can be made again; what a run needs stays.",
            cls="quiet",
        ),
        state.table(headings, rows, label="Caches"),
        state.command("speclab caches --clean --older-than 30"),
        cls="stack",
    )


def _removed(name: str) -> Node:
    gone = caches.remove(name)
    return notice("success", f"{gone.name} is removed: {in_words(gone.size)} are free again.")


def _users(one: CacheView) -> Node:
    if one.users:
        return el("span", [el("a", user, href=f"/runs?run={user}") for user in one.users])
    return "a process of this machine" if one.in_use else "nobody"


def _button(one: CacheView) -> Node:
    if one.in_use:
        return ""
    label = f"Remove {one.name}"
    return el(
        "button",
        "Remove",
        cls="button small stop",
        type="button",
        aria_label=label,
        data_action="remove",
        data_value=one.path,
    )
