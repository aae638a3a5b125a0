"""Markdown that strangers may have written, as an element tree: nothing in it becomes markup.

The part of Markdown that model cards use: headings, lists, fenced code, tables, paragraphs, inline
code, bold and links to the web. Anything else, HTML included, is shown as the text that it is. The
metadata block at the start is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from app.ui.components import state
from app.ui.components.elements import Node, el

_METADATA = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
_HEADING = re.compile(r"(#{1,6})\s+(.*)")
_ITEM = re.compile(r"\s*[-*]\s+(.*)")
_RULE = re.compile(r"\|?[\s:|-]*-[\s:|-]*\|?")
_INLINE = re.compile(
    r"`(?P<code>[^`]+)`|\*\*(?P<bold>[^*]+)\*\*|\[(?P<text>[^\]]+)\]\((?P<href>https?://[^\s)]+)\)"
)


def markdown(text: str) -> Node:
    """The tree of a Markdown text; its headings are of the second and third level."""
    lines = _METADATA.sub("", text.replace("\r\n", "\n"), count=1).split("\n")
    return el("div", _blocks(lines), cls="stack card-text")


def _blocks(lines: list[str]) -> Iterator[Node]:
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("```"):
            end = _until(lines, at + 1, lambda one: one.startswith("```"))
            yield el("pre", "\n".join(lines[at + 1 : end]), cls="raw")
            at = end + 1
        elif heading := _HEADING.fullmatch(line):
            yield el("h2" if len(heading[1]) == 1 else "h3", _spans(heading[2]))
            at += 1
        elif _ITEM.fullmatch(line):
            end = _until(lines, at, lambda one: not _ITEM.fullmatch(one))
            items = (_ITEM.fullmatch(one) for one in lines[at:end])
            yield el("ul", (el("li", _spans(item[1])) for item in items if item))
            at = end
        elif line.startswith("|"):
            end = _until(lines, at, lambda one: not one.startswith("|"))
            yield _table(lines[at:end])
            at = end
        elif line.strip():
            end = max(at + 1, _until(lines, at, _starts_other))
            yield el("p", _spans(" ".join(one.strip() for one in lines[at:end])))
            at = end
        else:
            at += 1


def _until(lines: list[str], at: int, ends: Callable[[str], object]) -> int:
    return next((i for i in range(at, len(lines)) if ends(lines[i])), len(lines))


def _starts_other(line: str) -> bool:
    started = line.startswith(("```", "|")) or _HEADING.fullmatch(line) or _ITEM.fullmatch(line)
    return not line.strip() or bool(started)


def _table(lines: list[str]) -> Node:
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    if len(rows) > 1 and _RULE.fullmatch(lines[1].strip()):
        del rows[1]
    head, *body = rows
    width = len(head)
    cells = ([_spans(c) for c in (row + [""] * width)[:width]] for row in body)
    return state.table(head, cells, label="Table")


def _spans(text: str) -> list[Node]:
    found: list[Node] = []
    at = 0
    for match in _INLINE.finditer(text):
        found.append(text[at : match.start()])
        if match["code"]:
            found.append(el("code", match["code"]))
        elif match["bold"]:
            found.append(el("strong", match["bold"]))
        else:
            found.append(el("a", match["text"], href=match["href"]))
        at = match.end()
    return [node for node in (*found, text[at:]) if node != ""]
