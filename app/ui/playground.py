"""Playground: ask a deployment, and watch which of its tokens were drafted, accepted, rejected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import gradio as gr

from app.services import deployments, playground
from app.services.views import DeploymentView, GenerationView
from app.ui.answering import PLAIN, SLIDERS, SPECULATIVE, stopped, stream
from app.ui.components import state
from app.ui.components.deployment import drafter, word
from app.ui.components.elements import Node, el
from app.ui.components.panel import Panel
from app.ui.components.token_view import (
    TokenView,
    idle_payload,
    legend,
    snapshot_payload,
)
from app.ui.fields import label
from app.ui.page import QUIET, frame, keep_current, problem_of, user_of
from speculators_core.errors import SpeclabError
from speculators_core.params import SamplingParams

SYSTEM = "You are a helpful assistant."


def build(blocks: gr.Blocks) -> None:
    """The page at /playground; `?deployment=ID` and `?generation=ID` choose what is shown."""
    with frame("Playground") as navigation:
        Panel(el("h1", "Playground"))
        with gr.Row(elem_classes="sl-playground"):
            with gr.Column(scale=2, min_width=280):
                chosen, about, fields, send, stop = _question()
            with gr.Column(scale=5, min_width=300):
                first, second, verdict = _answers()
                earlier = Panel(elem_id="earlier")

    shown = [first, second, verdict, send, stop]

    def ask(request: gr.Request, chosen: str | None, *entered: Any) -> Iterator[list[Any]]:
        wanted = request.query_params.get("deployment")
        one = chosen or preferred(deployments.list_deployments(active_only=True), wanted)
        yield from stream(user_of(request), one, *entered)

    def again(event: gr.EventData, request: gr.Request) -> Any:
        run = str((event._data or {}).get("run", ""))
        return _whole(run, user_of(request))

    def opened(request: gr.Request) -> Any:
        run = request.query_params.get("generation")
        return _whole(run, user_of(request)) if run else gr.skip()

    def read(request: gr.Request, deployment_id: str | None) -> list[Any]:
        known = deployments.list_deployments(active_only=True)
        wanted = deployment_id or request.query_params.get("deployment")
        return [
            choice_update(known, deployment_id, wanted),
            about_tree(deployment_id or wanted),
            earlier_tree(playground.list_generations(user_of(request), limit=6)),
        ]

    started = send.click(ask, fields, shown, **QUIET)
    stop.click(None, None, None, cancels=[started], **QUIET).then(stopped, None, shown, **QUIET)
    for view in (first, second):
        view.input(again, None, view, **QUIET)
    chosen.input(about_tree, chosen, about, **QUIET)
    blocks.load(opened, None, first, **QUIET)
    keep_current(blocks, "Playground", navigation, read, [chosen, about, earlier], inputs=[chosen])


def _question() -> tuple[Any, Panel, list[Any], gr.Button, gr.Button]:
    chosen = gr.Dropdown(
        [],
        allow_custom_value=True,  # what was deployed since the app started, too
        label="Deployment",
        elem_id="deployment",
    )
    about = Panel(elem_id="deployment-state")
    text = gr.Textbox(
        label="Message",
        placeholder="A shop sells pens at 3 dollars each. How much do 7 pens cost?",
        lines=4,
        max_lines=12,
        elem_id="message",
    )
    with gr.Row(elem_classes="sl-actions"):
        send = gr.Button("Send", variant="primary", elem_id="send")
        stop = gr.Button("Stop", elem_id="stop", elem_classes="sl-stop", visible=False)
    with gr.Column(elem_classes="sl-sampling"):
        plain = gr.Checkbox(label="Plain decoding", elem_id="plain")
        compare = gr.Checkbox(label="Compare with plain decoding", elem_id="compare")
        sampling = [_slider(*one) for one in SLIDERS]
        with gr.Accordion("System prompt", open=False):
            system = gr.Textbox(
                SYSTEM, show_label=False, container=False, lines=3, elem_id="system"
            )
    fields = [chosen, system, text, plain, compare, *sampling]
    return chosen, about, fields, send, stop


def _answers() -> tuple[TokenView, TokenView, Panel]:
    with gr.Row(elem_classes="sl-legend"):
        Panel(legend())
        hide = gr.Checkbox(
            label="Hide rejected", elem_id="hide-rejected", container=False, min_width=140, scale=0
        )
    hide.input(None, hide, None, js=HIDE, **QUIET)
    verdict = Panel(elem_id="verdict")
    with gr.Row(elem_classes="sl-answers"):
        first = TokenView(idle_payload("Answer", HINT), elem_id="tokens", min_width=280)
        second = TokenView(elem_id="tokens-plain", elem_classes="sl-compare", min_width=280)
    return first, second, verdict


HINT = "Choose a deployment, write a message and press Send."
HIDE = "(on) => { document.body.classList.toggle('sl-hide-rejected', on); return []; }"


def _slider(name: str, low: float, high: float, step: float) -> gr.Slider:
    field = SamplingParams.model_fields[name]
    return gr.Slider(
        low,
        high,
        value=field.default,
        step=step,
        label=label(name),
        info=(field.description or "").capitalize(),
        elem_id=f"field-{name.replace('_', '-')}",
    )


def _whole(run: str, user: str) -> Any:
    """A stored answer; in its place a sentence if there is none of this person's."""
    try:
        found = playground.generation(run, user)
    except SpeclabError as error:
        return idle_payload("Answer", str(error))
    return snapshot_payload(found, PLAIN if found.plain else SPECULATIVE)


def choice_update(
    known: Sequence[DeploymentView], chosen: str | None, wanted: str | None
) -> dict[str, Any]:
    """The deployments on offer, ready ones first."""
    offered = [(f"{one.name} · {drafter(one)} · {one.engine}", one.id) for one in _ranked(known)]
    if chosen or not offered:
        return dict(gr.update(choices=offered))
    return dict(gr.update(choices=offered, value=preferred(known, wanted)))


def preferred(known: Sequence[DeploymentView], wanted: str | None) -> str | None:
    """Which deployment answers where none is chosen yet: the page may be quicker than its list."""
    ids = [one.id for one in _ranked(known)]
    return wanted if wanted in ids else next(iter(ids), None)


def _ranked(known: Sequence[DeploymentView]) -> list[DeploymentView]:
    return sorted(known, key=lambda one: not one.ready)


def about_tree(deployment_id: str | None) -> Node:
    """The chosen deployment in a line; in words when it does not speculate."""
    if not deployment_id:
        link = el("a", "Deploy", href="/deploy")
        return state.empty("Nothing is served now. ", link, " a model, or try the ", HOME, ".")
    try:
        one = deployments.get(deployment_id)
    except SpeclabError as error:
        return problem_of(error)
    k = f"K = {one.speculative_tokens}" if one.speculative_tokens else "K from the speculator"
    return el(
        "div",
        el(
            "div",
            el("a", state.chip(word(one)), href=f"/runs?run={one.id}"),
            el("span", f"{drafter(one)} drafts, {k}, engine {one.engine}", cls="quiet small"),
            cls="row",
        ),
        el("p", INACTIVE, cls="small") if one.trace_mode == "off" and one.ready else None,
    )


HOME = el("a", "demo", href="/")
INACTIVE = "It publishes no trace: answers appear without colours."


def earlier_tree(found: Sequence[GenerationView]) -> Node:
    """The person's last answers, to be opened again."""
    if not found:
        return el("div")
    rows = (
        (
            el("a", _first_words(one), href=f"/playground?generation={one.id}"),
            "plain" if one.plain else state.number(one.numbers.get("acceptance_length")),
            state.number(one.numbers.get("tokens_per_second"), 1),
            state.ago(one.created_at),
        )
        for one in found
    )
    headings = ["Your last answers", "#Acceptance length", "#Tokens/s", "When"]
    return state.table(headings, rows, label="Your last answers")


def _first_words(one: GenerationView) -> str:
    said = next((m["content"] for m in reversed(one.messages) if m["role"] == "user"), "")
    line = " ".join(str(said).split())
    return line if len(line) <= 70 else line[:69] + "…"
