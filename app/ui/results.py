"""What a run made, on its page: where it is, what is worth knowing of it, and what comes next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from app.services import artifacts, data_sets
from app.services.views import RunView
from app.ui import conversion, training_result
from app.ui.components import state
from app.ui.components.elements import Node, el
from app.ui.components.panel import notice
from app.ui.launch import lines_tree
from app.ui.page import attempt
from speculators_core.params import JobKind


def tree(run: RunView) -> Node | None:
    """None for a kind that has no view of its own, or nothing to show yet."""
    if run.kind is JobKind.CONVERT:
        return conversion.result_tree(run)
    if run.kind is JobKind.TRAIN:
        return training_result.tree(run)
    shown = _OF_KIND.get(run.kind)
    result = run.result
    if shown is None or not result:
        return None
    return attempt(lambda: shown(run, result))


def has_view(kind: JobKind) -> bool:
    """Whether results of this kind are told by `tree` rather than as plain values."""
    return kind in _OF_KIND or kind in (JobKind.CONVERT, JobKind.TRAIN)


def _push(run: RunView, result: Mapping[str, Any]) -> Node:
    url = str(result.get("url"))
    private = bool(result.get("private"))
    facts: list[tuple[str, Any]] = [
        ("Repository", el("a", str(result.get("repository")), href=url)),
        ("Revision", el("code", str(result.get("revision")))),
        ("Seen by", "you and your organisation" if private else "everybody"),
    ]
    files = [(el("code", str(name)),) for name in result.get("files") or ()]
    return _card(
        "On the hub",
        state.facts(facts),
        el("div", el("a", "Open it there", href=url, cls="button primary"), cls="row"),
        state.table(["Files"], files, label="Files"),
    )


def _pull(run: RunView, result: Mapping[str, Any]) -> Node:
    what = str(result.get("what"))
    facts: list[tuple[str, Any]] = [
        ("It is a", what),
        ("Repository", str(result.get("repository"))),
        ("Revision", el("code", str(result.get("revision")))),
        ("Size", state.size(int(result.get("size") or 0))),
        ("Registered as", str(result.get("name") or "–")),
        ("Lies in", el("code", str(result.get("output")))),
    ]
    doubts = [
        notice("warning", f"{doubt.get('about')}: it leaves this open")
        for doubt in result.get("doubts") or ()
    ]
    return _card("From the hub", state.facts(facts), doubts, _next(what, result))


def _next(what: str, result: Mapping[str, Any]) -> Node:
    """Where one goes with what was brought."""
    name = str(result.get("name") or "")
    pinned = f"{result.get('repository')}@{result.get('revision')}"
    if what == "checkpoint":
        return _links([("Convert it", "/convert", {"checkpoint": pinned})])
    if what == "verifier":
        return _links(
            [
                ("Train a speculator for it", "/train", {"verifier": name}),
                ("Deploy it", "/deploy", {"verifier": name}),
            ]
        )
    if result.get("doubts"):
        return _links([("Decide what it leaves open", "/convert", {"checkpoint": pinned})])
    return _links([("Deploy it", "/deploy", {"speculator": name})])


def _export(run: RunView, result: Mapping[str, Any]) -> Node:
    losses = result.get("losses") or ()
    facts: list[tuple[str, Any]] = [
        ("Layout", str(result.get("format"))),
        ("Lies in", el("code", str(result.get("output")))),
    ]
    return el(
        "div",
        _card("Export", state.facts(facts), _losses(losses)),
        lines_tree(result.get("commands") or {}),
        _files(run),
        cls="stack",
    )


def _losses(losses: Sequence[Mapping[str, Any]]) -> Node:
    if not losses:
        return notice("success", "The layout holds all of it.")
    rows = (
        (
            el("code", str(loss.get("field"))),
            el("code", str(loss.get("value"))),
            str(loss.get("meaning")),
            el("span", "changes the draft", cls="chip warning") if loss.get("serious") else "",
        )
        for loss in losses
    )
    return el(
        "div",
        el("p", "What the layout has no words for:"),
        state.table(["Field", "Value", "What it means", ""], rows, label="Not held"),
        cls="stack",
    )


def _files(run: RunView) -> Node:
    rows = [
        (el("a", one.path, href=_address(run, one.path), download=""), state.size(one.size))
        for one in artifacts.list_files(run.id)
    ]
    table = state.table(["File", "#Size"], rows, label="Files of this run")
    return _card("Files", table if rows else state.empty("They are not there any more."))


def _address(run: RunView, path: str) -> str:
    return f"/api/runs/{run.id}/artifacts/{quote(path)}"


def _data(run: RunView, result: Mapping[str, Any]) -> Node:
    """Of runs that make data: what was counted, and the sets that it is registered as."""
    counted = [
        (name.replace("_", " ").capitalize(), _plain(value))
        for name, value in result.items()
        if name not in ("output", "held_out", "report") and not isinstance(value, (dict, list))
    ]
    made = [one for one in data_sets.list_data_sets() if one.run_id == run.id]
    links = [(f"Look at {one.name}", "/data", {"set": one.name}) for one in made]
    return _card("Data", state.facts(counted), _skipped(result), _links(links))


def _skipped(result: Mapping[str, Any]) -> Node | None:
    skipped = result.get("skipped")
    if not isinstance(skipped, Mapping) or not skipped:
        return None
    rows = ((str(reason), f"{count:,}") for reason, count in skipped.items())
    return state.table(["Skipped because", "#Chats"], rows, label="Skipped")


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _links(found: Sequence[tuple[str, str, Mapping[str, str]]]) -> Node:
    made = (
        el("a", text, href=f"{path}?{urlencode(query, quote_via=quote)}", cls="button")
        for text, path, query in found
    )
    return el("div", made, cls="row")


def _card(title: str, *parts: Node | Sequence[Node] | None) -> Node:
    return el("section", el("h2", title), *parts, cls="card", aria_label=title)


_OF_KIND: dict[JobKind, Callable[[RunView, Mapping[str, Any]], Node]] = {
    JobKind.PUSH: _push,
    JobKind.PULL: _pull,
    JobKind.EXPORT: _export,
    JobKind.SELF_WRITE: _data,
    JobKind.REGENERATE: _data,
    JobKind.PREPARE: _data,
}
