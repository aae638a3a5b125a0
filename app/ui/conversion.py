"""What a conversion left, on its run's page: how it went, what to decide, the report, the card."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from app.services import conversions, speculators
from app.services.views import RunView, SpeculatorView
from app.ui.components import state
from app.ui.components.elements import Node, el
from app.ui.components.markdown import markdown
from app.ui.components.panel import notice
from app.ui.inspection import params_text, question, tables_tree, warnings_tree
from app.ui.page import attempt, run_link


def act(what: str, value: str, run_id: str, user: str) -> Node:
    """Do what a button of `result_tree` asks for."""
    if what == "allow":
        made = speculators.allow(value, user)
        return notice("success", f"{made.name} may be deployed; your decision is recorded.")
    doubt, _, choice = value.partition("/")
    again = conversions.again(run_id, _whole(doubt), _whole(choice), user)
    return notice("success", "Queued:", run_link(again), state.chip(again.state))


def result_tree(run: RunView) -> Node | None:
    """None until it has succeeded."""
    result = run.result or {}
    name = result.get("name")
    if not isinstance(name, str):
        return None
    return attempt(lambda: _result(run, speculators.get(name)))


def _result(run: RunView, made: SpeculatorView) -> Node:
    result = run.result or {}
    return el(
        "div",
        el(
            "section",
            el("h2", made.name),
            _validation(result.get("validation") or {}),
            _verdict(made),
            cls="card",
            aria_label="Result",
        ),
        _doubts(result.get("doubts") or ()),
        warnings_tree(result.get("warnings") or ()),
        _file(
            "Model card", made, "card", lambda: markdown(conversions.card(made.name)), opened=True
        ),
        _file("Report", made, "report", lambda: tables_tree(conversions.report(made.name))),
        cls="stack",
    )


def acceptance(measured: Mapping[str, Any] | None) -> str:
    """First-token acceptance of a validation or a choice, `–` where it was not measured."""
    accepted = (measured or {}).get("first_token_acceptance")
    return state.number(None if accepted is None else 100 * accepted, 1, " %")


def deploy_link(made: SpeculatorView, cls: str | None = None) -> Node:
    """To the Deploy page, filled in."""
    pair = {"speculator": made.name, "verifier": made.verifier}
    return el("a", "Deploy", href=f"/deploy?{urlencode(pair, quote_via=quote)}", cls=cls)


def _validation(validation: Mapping[str, Any]) -> Node:
    ok = validation.get("ok")
    word, tone = ("passed", "ok") if ok else ("failed", "failed")
    if ok is None:
        word, tone = "not judged", ""
    facts: list[tuple[str, Any]] = [
        ("Validation", el("span", word, cls=f"chip {tone}".strip())),
        ("First tokens accepted", acceptance(validation)),
    ]
    if note := validation.get("note"):
        facts.append(("Why", str(note)))
    return state.facts(facts)


def _verdict(made: SpeculatorView) -> Node:
    if made.deployable:
        return el("div", deploy_link(made, "button primary"), cls="row")
    if made.servable:
        despite = "; ".join(made.allowed_despite or ())
        who = el("strong", made.allowed_by or "")
        told = notice("info", "Allowed by", who, state.ago(made.allowed_at), f"despite: {despite}")
        return el("div", told, el("div", deploy_link(made, "button primary")), cls="stack")
    reasons = el("ul", (el("li", reason) for reason in made.obstacles))
    text = "It can't be deployed yet:"
    if needed := made.needed:
        hint = el("span", state.sentence(needed), cls="hint")
        return notice("warning", text, reasons, hint)
    return el("div", notice("warning", text, reasons), el("div", _allow(made)), cls="stack")


def _allow(made: SpeculatorView) -> Node:
    return el(
        "button",
        "Allow anyway",
        cls="button",
        type="button",
        data_action="allow",
        data_value=made.name,
        data_confirm=f"Deploy {made.name} although {'; '.join(made.obstacles)}? "
        "Your name and the time are recorded.",
    )


def _doubts(doubts: Sequence[Mapping[str, Any]]) -> Node | None:
    open_ = [(i, doubt) for i, doubt in enumerate(doubts) if doubt.get("chosen") is None]
    if not open_:
        return None
    return el(
        "section",
        el("h2", "Left open"),
        (_choices(number, doubt) for number, doubt in open_),
        cls="stack",
        aria_label="Left open",
    )


def _choices(number: int, doubt: Mapping[str, Any]) -> Node:
    found = doubt.get("choices") or ()
    best = max((c.get("first_token_acceptance") or 0.0 for c in found), default=0.0)
    rows = (
        (
            str(choice["meaning"]),
            el("code", params_text(choice["params"])),
            _measured(choice, best),
            _again(f"{number}/{i}"),
        )
        for i, choice in enumerate(found)
    )
    headings = ["Choice", "Parameters", "#First tokens accepted", ""]
    table = state.table(headings, rows, label=question(doubt))
    return el("div", el("h3", question(doubt)), table, cls="stack")


def _measured(choice: Mapping[str, Any], best: float) -> Node:
    accepted, text = choice.get("first_token_acceptance"), acceptance(choice)
    return el("strong", text) if accepted and accepted == best else text


def _again(value: str) -> Node:
    return el(
        "button",
        "Convert again with this choice",
        cls="button small",
        type="button",
        data_action="again",
        data_value=value,
    )


def _file(
    title: str,
    made: SpeculatorView,
    which: str,
    content: Callable[[], Node],
    *,
    opened: bool = False,
) -> Node:
    """One of the files beside the weights: folded, and to be downloaded."""
    where = f"/api/speculators/{quote(made.name, safe='')}/{which}"
    link = el("a", "Download", href=where, download="", cls="button small")
    body = el("div", attempt(content), el("div", link), cls="stack")
    return el("details", el("summary", title), body, open=opened, cls="card", aria_label=title)


def _whole(text: str) -> int:
    return int(text) if text.isdecimal() else -1
