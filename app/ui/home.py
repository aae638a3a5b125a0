"""Home: what Speclab is, the demo, what is running, what was measured last."""

from __future__ import annotations

from collections.abc import Sequence

import gradio as gr

from app.services import demo, evaluations, runs
from app.services.views import DemoStage, DemoView, EvaluationView, RunView
from app.ui.components import state
from app.ui.components.elements import Node, el
from app.ui.components.panel import Panel, action
from app.ui.page import QUIET, attempt, frame, keep_current, problem, run_link, troubles, user_of

ACTIVE = ("running", "cancelling")


def build(blocks: gr.Blocks) -> None:
    """The page at /."""
    with frame("Home") as navigation:
        Panel(introduction(), elem_id="introduction")
        asked = Panel(elem_id="demo-answer")
        card = Panel(elem_id="demo")
        lab = Panel(elem_id="lab")

    def read(request: gr.Request) -> list[Node]:
        running = runs.list_runs(state=ACTIVE, limit=8).items
        waiting = runs.list_runs(state="queued", limit=1).total
        measured = evaluations.list_evaluations(limit=6)
        return [demo_card(demo.status()), lab_tree(running, waiting, measured)]

    def act(event: gr.EventData, request: gr.Request) -> Node:
        return attempt(lambda: _start(action(event)[0], user_of(request)))

    card.click(act, None, asked, **QUIET)
    keep_current(blocks, "Home", navigation, read, [card, lab])


def _start(what: str, user: str) -> Node:
    if what == "start-demo":
        demo.start(user)
    return el("div")


def introduction() -> Node:
    """Speclab in two sentences."""
    return el(
        "div",
        el("h1", "Make your LLM answer faster, and see why it does"),
        el(
            "p",
            "Speclab is a workbench for speculators, the small draft models of speculative "
            "decoding: train or convert an EAGLE-3 draft, measure what your model accepts of it, "
            "and serve both with vLLM. In the playground you watch every draft token being "
            "accepted or rejected.",
            cls="lead",
        ),
        cls="stack",
    )


def demo_card(view: DemoView) -> Node:
    """The demo: offered, under way or done, with its stages."""
    head = el(
        "div",
        el("h2", "Demo: a speculator of your own in about 40 minutes"),
        _demo_state(view),
        cls="row between",
    )
    about = el(
        "p", "Its domain: ", el("strong", view.domain), ". ", el("span", view.limits, cls="quiet")
    )
    return el(
        "section",
        head,
        about,
        el("p", el("strong", view.headline)) if view.headline else None,
        el("ol", (_stage(stage) for stage in view.stages), cls="stages"),
        el("div", _demo_buttons(view), cls="row"),
        cls="card",
        aria_label="Demo",
    )


def _demo_state(view: DemoView) -> Node:
    words = {"absent": "ready", "running": "running", "done": "done", "failed": "failed"}
    return state.chip(words[view.state]) if view.state != "absent" else el("span")


def _demo_buttons(view: DemoView) -> list[Node]:
    label = {"absent": "Try the demo", "failed": "Try again", "done": "Run it again"}
    found: list[Node] = []
    if view.state in label:
        tone = "button" if view.state == "done" else "button primary"
        found.append(
            el("button", label[view.state], cls=tone, type="button", data_action="start-demo")
        )
    if view.deployment_id:
        where = f"/playground?deployment={view.deployment_id}"
        tone = "button" if view.state in ("absent", "failed") else "button primary"
        found.append(el("a", "Open the playground", cls=tone, href=where))
    return found


def _stage(stage: DemoStage) -> Node:
    name = el("a", stage.title, href=f"/runs?run={stage.run_id}") if stage.run_id else stage.title
    word = (stage.phase or stage.state) if stage.state == "running" else stage.state
    live = stage.state in ("running", "cancelling")
    return el(
        "li",
        el("span", name, cls="name", title=stage.purpose),
        state.chip(str(word)) if word else el("span", "not started", cls="quiet small"),
        _stage_text(stage, live),
    )


def _stage_text(stage: DemoStage, live: bool) -> Node:
    if stage.error:
        return el("span", str(stage.error.get("message", "")), cls="small")
    if live and stage.phase != "ready":
        return state.progress(stage.progress, stage.text, stage.eta_s)
    return el("span", stage.purpose, cls="quiet small")


def lab_tree(running: Sequence[RunView], waiting: int, measured: Sequence[EvaluationView]) -> Node:
    """What the lab does now, and what it measured last."""
    return el(
        "div",
        *(problem({"message": text}) for text in troubles()),
        el("div", _now(running, waiting), _measured(measured), cls="grid"),
        cls="stack",
    )


def _now(running: Sequence[RunView], waiting: int) -> Node:
    rows = ((run_link(run), state.chip(run.state), _how_far(run)) for run in running)
    return el(
        "section",
        el("h2", "Now"),
        state.table(["Run", "State", "Progress"], rows, label="What is running")
        if running
        else state.empty("Nothing is running. Start with the demo, or with Train."),
        el("a", f"{waiting:,} waiting", href="/runs?state=queued", cls="small")
        if waiting
        else None,
        cls="stack",
    )


def _how_far(run: RunView) -> Node:
    if run.kind == "deploy":
        return el("span", run.progress_text, cls="quiet")
    return state.progress(run.progress, run.progress_text, run.eta_s)


def _measured(found: Sequence[EvaluationView]) -> Node:
    rows = (
        (
            el("a", name(one), href=f"/runs?run={one.run_id}") if one.run_id else name(one),
            state.number(one.acceptance_length),
            state.number(one.tokens_per_second, 1),
            state.number(one.tokens_per_second_plain, 1),
            state.ago(one.created_at),
        )
        for one in found
    )
    headings = ["Speculator", "#Acceptance length", "#Tokens/s", "#Plain", "When"]
    body = (
        state.table(headings, rows, label="Recent acceptance")
        if found
        else state.empty("No speculator has been evaluated yet.")
    )
    return el("section", el("h2", "Recent acceptance"), body, cls="stack")


def name(one: EvaluationView) -> str:
    return one.speculator.rstrip("/").rsplit("/", 1)[-1]
