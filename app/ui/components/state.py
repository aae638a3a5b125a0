"""How states, times, rates and sizes read: the same words and units on every page."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from app.ui.components.elements import Children, Node, el


def chip(state: str, title: str | None = None) -> Node:
    """One word in its colour, with a dot before it (shape: filled while it lasts)."""
    return el("span", state, cls=f"chip {state}", title=title)


def duration(seconds: float | None) -> str:
    """Two units at most: `8 s`, `4 min 10 s`, `2 h 5 min`, `3 d 1 h`."""
    if seconds is None:
        return "–"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def ago(moment: datetime | None) -> Node:
    """The age of a moment; the browser keeps counting. The title is the moment itself."""
    if moment is None:
        return "–"
    return el(
        "time",
        data_since=moment.timestamp(),
        data_suffix=" ago",
        title=stamp(moment),
    )


def took(started: datetime | None, finished: datetime | None) -> Node:
    """How long it took, or has been taking so far."""
    if started is None:
        return "–"
    if finished is None:
        return el("time", data_since=started.timestamp(), title=f"since {stamp(started)}")
    return duration((finished - started).total_seconds())


def stamp(moment: datetime | None) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC" if moment else "–"


def eta(seconds: float | None) -> str:
    """What is left, rounded to what an estimate is worth."""
    if seconds is None:
        return ""
    if seconds < 90:
        return f"about {max(5, 5 * round(seconds / 5))} s left"
    if seconds < 5400:
        return f"about {round(seconds / 60)} min left"
    return f"about {seconds / 3600:.1f} h left"


def progress(fraction: float | None, text: str, eta_s: float | None = None) -> Node:
    """A bar, its percentage, what is going on and what is left. Unknown fraction: a moving bar."""
    share = None if fraction is None else min(1.0, max(0.0, fraction))
    label = text or "in progress"
    return el(
        "div",
        el("progress", max="1", value=None if share is None else f"{share:.4f}", aria_label=label),
        el(
            "div",
            el("span", label),
            el("span", "" if share is None else f"{share:.0%}", cls="figure"),
            el("span", eta(eta_s), cls="quiet") if eta_s is not None else None,
            cls="progress-text",
        ),
        cls="progress",
    )


def facts(pairs: Iterable[tuple[str, Children]]) -> Node:
    """A list of names and values."""
    return el(
        "dl",
        (el("div", el("dt", name), el("dd", value)) for name, value in pairs),
        cls="facts",
    )


def table(headings: Iterable[str], rows: Iterable[Iterable[Children]], *, label: str) -> Node:
    """A table; a heading that starts with `#` is of a column of numbers (right-aligned)."""
    names = list(headings)
    numeric = [name.startswith("#") for name in names]
    head = (
        el("th", name.lstrip("#"), scope="col", cls="number" if right else None)
        for name, right in zip(names, numeric, strict=True)
    )
    body = (
        el(
            "tr",
            (
                el("td", cell, cls="number" if right else None, data_label=name.lstrip("#"))
                for cell, name, right in zip(row, names, numeric, strict=True)
            ),
        )
        for row in rows
    )
    grid = el("table", el("thead", el("tr", head)), el("tbody", body), aria_label=label)
    return el("div", grid, cls="table", tabindex=0, role="region", aria_label=label)


def long_table(
    headings: Iterable[str], rows: Iterable[Iterable[Children]], *, label: str, limit: int = 20
) -> Node:
    """A table that starts with its first rows where it has far more, says how many, and can be
    searched; what a reader does with it stays in the browser.
    """
    whole = list(rows)
    grid = table(headings, whole, label=label)
    if len(whole) <= 1.5 * limit:
        return grid
    tools = el(
        "div",
        el("input", type="search", placeholder="Filter", aria_label=f"Filter: {label}"),
        el("span", f"{len(whole):,} in all", cls="count quiet small", role="status"),
        cls="row",
    )
    button = el("button", "Show all", cls="button small", type="button", data_all="")
    return el("div", tools, grid, el("div", button), cls="stack long", data_limit=limit)


def command(line: str, label: str = "Same from a terminal") -> Node:
    """A command line with a button that copies it."""
    return el(
        "div",
        el("span", label, cls="quiet"),
        el(
            "div",
            el("code", line),
            el("button", "Copy", cls="button small", data_copy=line, type="button"),
            cls="command-line",
        ),
        cls="command",
    )


def empty(text: str, *more: Children) -> Node:
    """What an empty place says: what to do first."""
    return el("p", text, *more, cls="empty")


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """`–` where there is none."""
    return "–" if value is None else f"{value:.{digits}f}{unit}"


def size(count: int) -> str:
    """Bytes in binary units."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def sentence(text: str) -> str:
    """With a capital at its beginning and a mark at its end."""
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '?', '!')) else '.'}"
