"""Models: what the lab knows, speculators, verifiers, data sets and evaluations, and how to add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import gradio as gr

from app.services import data_sets, evaluations, speculators, verifiers
from app.services.views import DataSetView, EvaluationView, SpeculatorView, VerifierView
from app.ui.choices import data_names, speculator_names, verifier_names
from app.ui.components import state
from app.ui.components.elements import Node, el
from app.ui.components.panel import Panel
from app.ui.conversion import deploy_link
from app.ui.forms import Form
from app.ui.page import SUBMIT, frame, keep_current, user_of
from app.ui.submission import submit
from speculators_core.params import EvaluateParams, JobKind, VerifierParams


def build(blocks: gr.Blocks) -> None:
    """The page at /models."""
    measuring, bringing = Form(EvaluateParams), Form(VerifierParams)
    with frame("Models") as navigation:
        Panel(el("h1", "Models"))
        known = Panel(elem_id="models")
        with gr.Accordion("Evaluate a speculator", open=False):
            with gr.Row():
                measuring.draw("speculator", "verifier", "data", choices={"data": ()})
            with gr.Row():
                measuring.draw("engine", "speculative_tokens", "max_tokens", "samples")
                measuring.draw("temperature", "plain_samples", "seed")
            measure = gr.Button("Evaluate", variant="primary", elem_id="evaluate")
            command = Panel(elem_id="evaluate-command")
        with gr.Accordion("Bring a verifier", open=False):
            with gr.Row():
                bringing.draw("source", "name")
            bring = gr.Button("Bring", variant="primary", elem_id="bring")
        answer = Panel(elem_id="models-answer")

    def submitter(form: Form, kind: JobKind) -> Any:
        def handler(request: gr.Request, *entered: Any) -> Node:
            return submit(form, kind, entered, user_of(request))

        return handler

    for button, form, kind in (
        (measure, measuring, JobKind.EVALUATE),
        (bring, bringing, JobKind.VERIFIER),
    ):
        button.click(
            submitter(form, kind), form.inputs, answer, validator=form.validator(), **SUBMIT
        )
    measuring.show_command(command, JobKind.EVALUATE, blocks)
    registered = {"speculator": speculator_names, "verifier": verifier_names, "data": _prompts}
    measuring.open_with(blocks, registered)
    keep_current(blocks, "Models", navigation, lambda request: [_known()], [known])


def _prompts() -> list[str]:
    return data_names("prompts", "chats")


def _known() -> Node:
    return el(
        "div",
        _section("Speculators", speculators_table(speculators.list_speculators())),
        _section("Evaluations", evaluations_table(evaluations.list_evaluations()[:50])),
        _section("Verifiers", verifiers_table(verifiers.list_verifiers())),
        _section("Data sets", data_table(data_sets.list_data_sets())),
        cls="stack",
    )


def _section(title: str, body: Node) -> Node:
    return el("section", el("h2", title), body, cls="stack", aria_label=title)


def speculators_table(found: Sequence[SpeculatorView]) -> Node:
    if not found:
        train, convert = el("a", "Train", href="/train"), el("a", "convert", href="/convert")
        return state.empty("No speculator yet. ", train, " one, or ", convert, " one you have.")
    rows = (
        (
            _origin(one.name, one.run_id),
            one.algorithm,
            _last(one.verifier),
            f"{one.draft_vocab_size:,}",
            str(one.speculative_tokens),
            _deployable(one),
            state.ago(one.created_at),
        )
        for one in found
    )
    headings = ["Name", "Algorithm", "Verifier", "#Draft vocabulary", "#K", "Deploy", "Added"]
    return state.table(headings, rows, label="Speculators")


def _deployable(one: SpeculatorView) -> Node:
    """The way to deploy it, who allowed it, or what stands in the way and where to decide."""
    if one.deployable:
        return deploy_link(one)
    reasons = "; ".join(one.obstacles)
    if one.servable:
        who = el("span", f"allowed by {one.allowed_by}", cls="quiet small", title=reasons)
        return el("span", deploy_link(one), " ", who)
    told = [state.chip("doubtful", reasons), el("span", reasons, cls="quiet small")]
    if one.run_id:
        told.append(el("a", "Decide", href=f"/runs?run={one.run_id}"))
    return el("span", told, cls="row")


def evaluations_table(found: Sequence[EvaluationView]) -> Node:
    if not found:
        return state.empty("Nothing has been evaluated yet.")
    rows = (
        (
            _origin(_last(one.speculator), one.run_id),
            _last(one.data),
            _last(one.engine),
            str(one.speculative_tokens),
            state.number(one.acceptance_length),
            state.number(100 * one.acceptance_rate, 0, " %"),
            state.number(one.tokens_per_second, 1),
            state.number(one.tokens_per_second_plain, 1),
            state.ago(one.created_at),
        )
        for one in found
    )
    headings = ["Speculator", "Data", "Engine", "#K", "#Acceptance length", "#Rate", "#Tokens/s"]
    return state.table([*headings, "#Plain tokens/s", "When"], rows, label="Evaluations")


def verifiers_table(found: Sequence[VerifierView]) -> Node:
    if not found:
        return state.empty("No verifier yet. The demo brings one; or bring your own below.")
    rows = (
        (
            _origin(one.name, one.run_id),
            one.architecture,
            str(one.num_layers),
            f"{one.hidden_size:,}",
            f"{one.vocab_size:,}",
            el("code", one.source),
        )
        for one in found
    )
    headings = ["Name", "Architecture", "#Layers", "#Hidden", "#Vocabulary", "Source"]
    return state.table(headings, rows, label="Verifiers")


def data_table(found: Sequence[DataSetView]) -> Node:
    if not found:
        return state.empty(
            "No data yet. Upload chats on the ", el("a", "Train", href="/train"), " page."
        )
    rows = (
        (
            _origin(one.name, one.run_id),
            one.kind,
            f"{one.samples:,}",
            el("code", one.digest[:12], title=one.digest),
            el("a", "Train on it", href=f"/train?data={quote(one.name)}")
            if one.kind != "prompts"
            else "",
            state.ago(one.created_at),
        )
        for one in found
    )
    headings = ["Name", "Kind", "#Samples", "Digest", "Use", "Added"]
    return state.table(headings, rows, label="Data sets")


def _origin(name: str, run_id: str | None) -> Node:
    return el("a", name, href=f"/runs?run={run_id}") if run_id else name


def _last(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]
