"""Deploy: serve a verifier with a drafter, and see what is being served."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import gradio as gr

from app.services import deployments
from app.services.views import DeploymentView
from app.ui.choices import speculator_names, verifier_names
from app.ui.components import state
from app.ui.components.deployment import drafter, verifier, word
from app.ui.components.elements import Node, el
from app.ui.components.panel import Panel, action
from app.ui.forms import Form
from app.ui.page import QUIET, attempt, frame, keep_current, user_of
from app.ui.submission import submit
from speculators_core.params import DeployParams, JobKind

NGRAM = "n-gram drafter (prompt lookup)"


def build(blocks: gr.Blocks) -> None:
    """The page at /deploy."""
    form = Form(DeployParams, nothing=NGRAM)
    with frame("Deploy") as navigation:
        Panel(introduction())
        with gr.Row():
            form.draw("speculator", "verifier")
        with gr.Row():
            form.draw("engine", "speculative_tokens", "port")
        with gr.Accordion("Advanced", open=False), gr.Row():
            form.draw("max_model_len", "max_num_seqs", "dtype", "trace")
        with gr.Row(elem_classes="sl-actions"):
            go = gr.Button("Deploy", variant="primary", elem_id="deploy", scale=0)
        command = Panel(elem_id="deploy-command")
        answer = Panel(elem_id="deploy-answer")
        Panel(el("h2", "Deployments"))
        served = Panel(elem_id="deployments")

    def serve(request: gr.Request, *entered: Any) -> Node:
        return submit(form, JobKind.DEPLOY, entered, user_of(request))

    def act(event: gr.EventData, request: gr.Request) -> Node:
        return attempt(lambda: _act(*action(event), user=user_of(request)))

    go.click(serve, form.inputs, answer, **QUIET)
    served.click(act, None, answer, **QUIET)
    form.open_with(blocks, {"speculator": _drafters, "verifier": verifier_names})
    form.show_command(command, JobKind.DEPLOY, blocks)

    def read(request: gr.Request) -> list[Node]:
        return [list_tree(deployments.list_deployments(limit=30), str(request.base_url))]

    keep_current(blocks, "Deploy", navigation, read, [served])


def introduction() -> Node:
    return el(
        "div",
        el("h1", "Deploy"),
        el(
            "p",
            "Serve a verifier together with its speculator behind an OpenAI-compatible address. "
            "A deployment runs until someone stops it.",
            cls="lead",
        ),
        cls="stack",
    )


def _drafters() -> list[str]:
    return [*speculator_names(), NGRAM]


def _act(what: str, deployment_id: str, user: str) -> Node:
    if what == "stop":
        deployments.stop(deployment_id, user)
    return el("div")


def list_tree(found: Sequence[DeploymentView], base_url: str) -> Node:
    """What is being served as cards, what was served as a table."""
    active = [one for one in found if one.active]
    ended = [one for one in found if not one.active]
    nothing = state.empty("Nothing is being served. Choose a speculator above and press Deploy.")
    return el(
        "div",
        el("div", (_card(one, base_url) for one in active), cls="grid") if active else nothing,
        _history(ended[:10]) if ended else None,
        cls="stack",
    )


def _card(one: DeploymentView, base_url: str) -> Node:
    buttons = [el("a", "Log", cls="button", href=f"/runs?run={one.id}")]
    if one.ready:
        where = f"/playground?deployment={one.id}"
        buttons.insert(0, el("a", "Open in playground", cls="button", href=where))
    buttons.append(_stop(one))
    return el(
        "section",
        el(
            "div",
            el("h3", el("a", one.name, href=f"/runs?run={one.id}")),
            state.chip(word(one)),
            cls="row between",
        ),
        el("span", one.progress_text, cls="quiet small") if _coming(one) else None,
        state.facts(_facts(one)),
        [el("span", note, cls="quiet small") for note in one.notes],
        state.command(curl(one, base_url), "Ask it from a terminal") if one.ready else None,
        el("div", buttons, cls="row"),
        cls="card",
        aria_label=one.name,
    )


def _coming(one: DeploymentView) -> bool:
    return not one.ready and bool(one.progress_text)


def _stop(one: DeploymentView) -> Node:
    asked = one.state == "cancelling"
    return el(
        "button",
        "Stopping…" if asked else "Stop",
        cls="button stop",
        type="button",
        data_action=None if asked else "stop",
        data_value=one.id,
        aria_disabled="true" if asked else None,
    )


def _facts(one: DeploymentView) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = [
        ("Verifier", verifier(one)),
        ("Drafter", drafter(one)),
        ("Engine", one.engine),
        ("K", str(one.speculative_tokens) if one.speculative_tokens else "–"),
        ("Trace", one.trace_mode.value),
        ("Owner", one.owner),
    ]
    if one.ready_at:
        found.append(("Ready since", state.ago(one.ready_at)))
    if one.endpoint:
        found.append(("Endpoint", el("code", f"{one.endpoint}/v1")))
    if one.dropped_records:
        found.append(("Trace records dropped", f"{one.dropped_records:,}"))
    return found


def curl(one: DeploymentView, base_url: str) -> str:
    """A question to the deployment, for a terminal on its host (through the app it needs the
    token of SPECLAB_HOME/api-token)."""
    body = {
        "model": one.served_name,
        "messages": [{"role": "user", "content": "What is 7 times 6?"}],
        "max_tokens": 64,
    }
    address = (one.endpoint or f"{base_url.rstrip('/')}/deployments/{one.id}").rstrip("/")
    quoted = json.dumps(body).replace("'", "'\\''")
    return f"curl {address}/v1/chat/completions -H 'Content-Type: application/json' -d '{quoted}'"


def _history(ended: Sequence[DeploymentView]) -> Node:
    rows = (
        (
            el("a", one.name, href=f"/runs?run={one.id}"),
            state.chip(one.state.value),
            drafter(one),
            one.engine,
            state.took(one.started_at, one.finished_at),
            el("span", str((one.error or {}).get("message", "")), cls="quiet"),
        )
        for one in ended
    )
    headings = ["Earlier", "State", "Drafter", "Engine", "#Served for", "Why it ended"]
    return state.table(headings, rows, label="Earlier deployments")
