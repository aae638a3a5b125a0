"""A run as trees: what it is and what can be done with it, and its own parameters."""

from __future__ import annotations

import json
from typing import Any

from app.services import resuming
from app.services.views import RunView
from app.ui import results
from app.ui.commands import submit_line, yaml_tree
from app.ui.components import state
from app.ui.components.elements import Node, el
from app.ui.page import attempt, problem
from speculators_core.params import JobKind, parse_params

STOPPABLE = ("queued", "running", "cancelling")


def header_tree(run: RunView) -> Node:
    """Name, state, what can be done, why it failed, how far it is."""
    title = el("div", el("h1", run.name), state.chip(run.state), cls="row")
    return el(
        "div",
        el("div", el("a", "← All runs", href="/runs"), cls="small"),
        el("div", title, el("div", _buttons(run), cls="row"), cls="row between"),
        problem(run.error) if run.error and run.state != "succeeded" else None,
        _progress(run),
        state.facts(_facts(run)),
        cls="stack",
    )


def _buttons(run: RunView) -> list[Node]:
    found = []
    if run.kind == "deploy" and run.state == "running":
        where = f"/playground?deployment={run.id}"
        found.append(el("a", "Open in playground", cls="button", href=where))
    if run.state in STOPPABLE:
        asked = run.state == "cancelling"
        word = "Stopping…" if asked else "Stop" if run.kind == "deploy" else "Cancel"
        found.append(_button(word, "stop", None if asked else "cancel", run.id))
    if resuming.can_resume(run):
        found.append(_button("Resume", "primary", "resume", run.id))
    if run.ended:
        found.append(_button("Retry", "", "retry", run.id))
    return found


def _button(label: str, tone: str, what: str | None, run_id: str) -> Node:
    return el(
        "button",
        label,
        cls=f"button {tone}".strip(),
        type="button",
        data_action=what,
        data_value=run_id,
        aria_disabled=None if what else "true",
    )


def _progress(run: RunView) -> Node | None:
    if run.state in ("running", "cancelling"):
        return state.progress(run.progress, run.progress_text, run.eta_s)
    if run.state == "queued":
        first = el("span", "It starts when a slot is free")
        needs = [el("a", one, href=f"/runs?run={one}") for one in run.needs]
        return el(
            "p", first, *([" and these have succeeded: ", *_listed(needs)] if needs else []), "."
        )
    return None


def _listed(nodes: list[Node]) -> list[Node]:
    return [part for node in nodes for part in (", ", node)][1:]


def _facts(run: RunView) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = [
        ("Kind", run.kind.value.replace("_", "-")),
        ("Owner", run.owner),
        ("Submitted", state.ago(run.created_at)),
        ("Started", state.ago(run.started_at)),
        ("Duration", state.took(run.started_at, run.finished_at)),
    ]
    if not run.ended and run.heartbeat_at:
        found.append(("Last heartbeat", state.ago(run.heartbeat_at)))
    if run.host:
        found.append(("Host", run.host))
    if run.attempt > 1:
        found.append(("Attempt", str(run.attempt)))
    return found


def rest_tree(run: RunView) -> Node:
    """Result, the run's own parameters, the command line."""
    return el(
        "div",
        None if results.has_view(run.kind) else _result(run.result),
        el(
            "section",
            el("h2", "Parameters"),
            _values(run.params),
            state.command(submit_line(run.kind, run.params)),
            _yaml(run),
            cls="card",
        ),
        cls="stack",
    )


def _yaml(run: RunView) -> Node | None:
    """Of runs whose parameters people keep as files."""
    if run.kind is not JobKind.TRAIN:
        return None
    return attempt(lambda: yaml_tree(parse_params(run.kind, run.params)))


def _result(result: dict[str, Any] | None) -> Node | None:
    if not result:
        return None
    simple = {k: v for k, v in result.items() if not isinstance(v, (dict, list))}
    nested = {k: v for k, v in result.items() if k not in simple}
    return el(
        "section",
        el("h2", "Result"),
        _values(simple),
        (_folded(name, value) for name, value in nested.items() if value),
        cls="card",
    )


def _folded(name: str, value: Any) -> Node:
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    return el("details", el("summary", _label(name)), el("pre", text, cls="raw"))


def _values(values: dict[str, Any]) -> Node:
    pairs = ((_label(name), el("code", _shown(value))) for name, value in values.items())
    return el("div", state.facts(pairs), cls="params")


def _label(name: str) -> str:
    return name.replace("_", " ")


def _shown(value: Any) -> Node:
    if isinstance(value, str) and value.startswith("run:"):
        return el("a", value, href=f"/runs?run={value.removeprefix('run:').split('/')[0]}")
    if isinstance(value, list) and len(value) == 1:
        return _shown(value[0])
    return _plain(value)


def _plain(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(str(part) for part in value) or "–"
    return str(value)
