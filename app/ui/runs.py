"""Runs: the queue and its history. `?run=ID` shows one run (`run_detail`) instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gradio as gr

from app.services import runs
from app.services.views import Page, RunView
from app.ui import run_detail
from app.ui.components import state
from app.ui.components.elements import Node, el
from app.ui.components.panel import Panel, action
from app.ui.page import POLL_SECONDS, QUIET, attempt, frame, keep_current
from speculators_core.params import JobKind

PAGE_SIZE = 25
ALL = "all"
STATES = ("queued", "running", "cancelling", "succeeded", "failed", "cancelled", "lost")
# A relative address would resolve against Gradio's base tag and lose the page.
KEEP_ADDRESS = """(kind, state, search, offset) => {
  const query = new URLSearchParams();
  if (kind !== "all") query.set("kind", kind);
  if (state !== "all") query.set("state", state);
  if (search) query.set("search", search);
  if (offset) query.set("offset", offset);
  const text = query.toString();
  history.replaceState(null, "", location.pathname + (text ? "?" + text : ""));
  return [kind, state, search, offset];
}"""


def build(blocks: gr.Blocks) -> None:
    """The page at /runs."""
    with frame("Runs") as navigation:
        with gr.Column(elem_id="run-list", elem_classes="sl-page") as everything:
            _build_list(blocks)
        with gr.Column(elem_id="run-detail", elem_classes="sl-page", visible=False) as one:
            run_detail.build(blocks)

    def choose(request: gr.Request) -> list[Any]:
        single = bool(request.query_params.get("run"))
        return [gr.Column(visible=not single), gr.Column(visible=single)]

    blocks.load(choose, None, [everything, one], **QUIET)
    keep_current(blocks, "Runs", navigation, lambda request: [], [])


def _build_list(blocks: gr.Blocks) -> None:
    Panel(el("h1", "Runs"))
    with gr.Row(elem_classes="sl-filters"):
        kind = gr.Dropdown([ALL, *(k.value for k in JobKind)], value=ALL, label="Kind")
        which = gr.Dropdown([ALL, *STATES], value=ALL, label="State")
        search = gr.Textbox(label="Search", placeholder="name, owner or id", max_lines=1)
    offset = gr.Number(0, precision=0, visible=False)
    table = Panel(elem_id="runs")
    shown = gr.State(None)  # what the browser has; None while one run is shown instead
    filters = [kind, which, search, offset]

    def opened(request: gr.Request) -> list[Any]:
        query = request.query_params
        wanted = [query.get("kind", ALL), query.get("state", ALL), query.get("search", "")]
        return [*wanted, _whole(query.get("offset")), None if query.get("run") else 0]

    def refresh(before: int | None, *chosen: Any) -> list[Any]:
        if before is None:
            return [gr.skip(), gr.skip()]
        tree = attempt(lambda: list_tree(find(*chosen)))
        now = hash(str(tree))
        return [gr.skip(), gr.skip()] if now == before else [now, tree]

    def turn(event: gr.EventData) -> int:
        return _whole(action(event)[1])

    inputs, outputs = [shown, *filters], [shown, table]
    blocks.load(opened, None, [*filters, shown], **QUIET).then(refresh, inputs, outputs, **QUIET)
    gr.Timer(POLL_SECONDS).tick(refresh, inputs, outputs, **QUIET)
    for first in (
        gr.on([kind.input, which.input, search.input], lambda: 0, None, offset, **QUIET),
        table.click(turn, None, offset, **QUIET),
    ):
        first.then(None, filters, filters, js=KEEP_ADDRESS, **QUIET).then(
            refresh, inputs, outputs, **QUIET
        )


def find(kind: str, which: str, search: str, offset: float | None) -> Page[RunView]:
    """The runs that the filters let through."""
    return runs.list_runs(
        kind=None if kind == ALL else kind,
        state=None if which == ALL else which,
        search=search.strip() or None,
        limit=PAGE_SIZE,
        offset=int(offset or 0),
    )


def list_tree(page: Page[RunView]) -> Node:
    """The table of runs and its pages."""
    if not page.items:
        start = el("a", "Try the demo", href="/")
        return state.empty("No run is here. ", start, ", or change the filters.")
    headings = ["Run", "Kind", "State", "Owner", "Progress", "Started", "#Duration"]
    table = state.table(headings, (_row(run) for run in page.items), label="Runs")
    return el("div", table, _pages(page), cls="stack")


def _row(run: RunView) -> Sequence[Node]:
    live = run.state in ("running", "cancelling")
    return (
        el("a", run.name, href=f"/runs?run={run.id}", title=run.id),
        run.kind.value.replace("_", "-"),
        state.chip(run.state),
        run.owner,
        _how_far(run) if live else _last_words(run),
        state.ago(run.started_at),
        state.took(run.started_at, run.finished_at),
    )


def _how_far(run: RunView) -> Node:
    if run.kind == "deploy":
        return el("span", run.progress_text, cls="quiet")
    return state.progress(run.progress, run.progress_text, run.eta_s)


def _last_words(run: RunView) -> Node:
    text = str((run.error or {}).get("message") or run.progress_text or "")
    if not text:
        return ""
    return el("span", text if len(text) <= 90 else text[:89] + "…", cls="quiet", title=text)


def _pages(page: Page[RunView]) -> Node:
    last = min(page.offset + len(page.items), page.total)
    turns = []
    if page.offset:
        turns.append(_turn("Newer", max(0, page.offset - page.limit)))
    if last < page.total:
        turns.append(_turn("Older", page.offset + page.limit))
    count = f"{page.offset + 1}–{last} of {page.total:,} runs"
    return el(
        "div", el("span", count, cls="quiet small"), el("span", turns, cls="row"), cls="row between"
    )


def _turn(label: str, offset: int) -> Node:
    return el(
        "button", label, cls="button small", type="button", data_action="page", data_value=offset
    )


def _whole(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0
