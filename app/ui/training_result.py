"""A training on its run's page: what to expect of it, what it reached, which tensors it changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from app.services import data_sets, speculators
from app.services.views import RunView, SpeculatorView
from app.ui.components import state
from app.ui.components.elements import Node, el
from app.ui.components.panel import notice
from app.ui.conversion import deploy_link
from app.ui.page import attempt
from app.ui.training_fields import DRAFT
from speculators_core.errors import NotFound
from speculators_core.training.presets import BANDS

_STEPS = 16  # TTT steps at most
_FAR_APART = 0.1
_APART = (
    "Predicted on the validation chats as they are written, measured on answers that the verifier "
    "gave itself. Where both are far apart, the chats are not what the verifier would say "
    "(regenerate their answers with it), or too few were looked at."
)


def tree(run: RunView) -> Node:
    """Also while it runs: what may be expected is there from the start."""
    return el(
        "div",
        attempt(lambda: _made(run, run.result or {})) if run.result else None,
        _expectation(run),
        cls="stack",
    )


def _made(run: RunView, result: Mapping[str, Any]) -> Node:
    return el(
        "section",
        el("h2", str(result.get("name") or "Result")),
        _ended_early(run, result),
        state.facts(_facts(result)),
        _best(result.get("best") or {}),
        _tensors(result),
        el("div", _next(run, result), cls="row"),
        cls="card",
        aria_label="Result",
    )


def _facts(result: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = [
        ("Steps", f"{result.get('steps', 0):,}"),
        ("Time", state.duration(result.get("seconds"))),
    ]
    counted = {
        "skipped": "Steps without a trained token",
        "quarantined": "Chats set aside (states no numbers)",
    }
    found += [(title, f"{result[key]:,}") for key, title in counted.items() if key in result]
    found.append(("Lies in", el("code", str(result.get("output")))))
    return found


def _ended_early(run: RunView, result: Mapping[str, Any]) -> Node | None:
    if not result.get("ended_early"):
        return None
    best, patience = (result.get("best") or {}).get("step"), run.params.get("patience")
    told = "" if best is None else f"; the best weights are those of step {best:,.0f}"
    text = (
        f"Ended early at step {result.get('steps')}: {patience} times in a row nothing got better"
    )
    return notice("info", f"{text}{told}.")


def _best(best: Mapping[str, Any]) -> Node | None:
    """The numbers of the weights that were written."""
    if not best:
        return None
    accepted = [best.get(f"acceptance_{k}") for k in range(_STEPS)]
    positions = [state.number(100 * one, 1, " %") for one in accepted if one is not None]
    coverage = best.get("coverage")
    predicted = best.get("served_acceptance_length")
    measured = best.get("measured_acceptance_length")
    share = state.number(None if coverage is None else 100 * coverage, 1, " %")
    facts: list[tuple[str, Any]] = [
        ("Accepted at positions 1, 2, …", ", ".join(positions) or "–"),
        ("Acceptance length, predicted", state.number(predicted)),
        ("Measured on held-out prompts", state.number(measured)),
        ("The verifier's choices covered", share),
    ]
    apart = predicted and measured and abs(predicted - measured) > _FAR_APART
    return el(
        "div",
        el("h3", "The weights that were kept"),
        state.facts(facts),
        el("p", _APART, cls="quiet small") if apart else None,
        cls="stack",
    )


def _tensors(result: Mapping[str, Any]) -> Node | None:
    """Which tensors were trained and which stayed as they were."""
    lists = [
        (title, [str(name) for name in result.get(key) or ()])
        for title, key in (("Trained", "trainable"), ("Frozen", "frozen"))
    ]
    if not any(names for _, names in lists):
        return None
    return el("div", (_folded(title, names) for title, names in lists), cls="stack")


def _folded(title: str, names: Sequence[str]) -> Node:
    return el(
        "details",
        el("summary", f"{title}: {len(names)} tensor{'' if len(names) == 1 else 's'}"),
        el("ul", (el("li", el("code", name)) for name in names), cls="names"),
        open=title == "Trained",
    )


def _next(run: RunView, result: Mapping[str, Any]) -> list[Node]:
    try:
        made = speculators.get(str(result.get("name")))
    except NotFound:
        return []
    pair = {"form": "evaluate", "speculator": made.name, "verifier": made.verifier}
    evaluate = urlencode(pair, quote_via=quote)
    return [
        deploy_link(made, "button primary"),
        el("a", "Evaluate", href=f"/models?{evaluate}", cls="button"),
        el("a", "Train further", href=further(run, made), cls="button"),
    ]


def further(run: RunView, made: SpeculatorView) -> str:
    """The Train page as this run was asked for, its speculator as the start. What the draft is
    (layers, norms) comes with the speculator.
    """
    kept = {
        name: "" if value is None else value
        for name, value in run.params.items()
        if name not in DRAFT and not isinstance(value, (list, dict))
    }
    known = {one.run_id: one.name for one in data_sets.list_data_sets() if one.kind == "prepared"}
    data = str(kept.pop("data", ""))
    data = known.get(data.removeprefix("run:"), data)
    named = {} if data.startswith("run:") else {"data": data}
    query = {**kept, **named, "start_from": made.name}
    return f"/train?{urlencode(query, quote_via=quote)}"


def _expectation(run: RunView) -> Node:
    rows = ((f"{band.low:.2f} to {band.high:.2f}", band.about) for band in BANDS)
    return el(
        "details",
        el("summary", "What to expect: how many first draft tokens are accepted"),
        state.table(["#Share", "After training on"], rows, label="What to expect"),
        el(
            "p",
            "The chart's band is that of 5,000 varied chats. Fewer chats of a narrow domain do "
            "better there, and worse everywhere else.",
            cls="quiet small",
        ),
        open=not run.ended,
        cls="card",
        aria_label="What to expect",
    )
