"""Element trees: what a page shows, as plain data that a browser can draw without parsing HTML.

A node is a string (a text node) or `[tag, attributes, children]`. The client creates elements
and sets `textContent`, so nothing in a tree is ever read as markup or code, whatever a run's
name, a log line or a model's answer contains. Tags and attributes are allow-listed here and
once more in `panel.js`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeGuard

Node = str | list[Any]
Children = Node | Iterable[Node] | None

_INLINE = frozenset(
    {"a", "button", "code", "del", "em", "progress", "small", "span", "strong", "time"}
)
_BLOCKS = frozenset({"div", "section", "header", "nav", "p", "pre", "h1", "h2", "h3", "details"})
_FORMS = frozenset({"fieldset", "input", "label", "legend"})
_LISTS = frozenset({"ul", "ol", "li", "dl", "dt", "dd", "summary"})
_TABLES = frozenset({"table", "thead", "tbody", "tr", "th", "td"})
TAGS = _INLINE | _BLOCKS | _FORMS | _LISTS | _TABLES
_COMMON = frozenset({"class", "id", "title", "role", "tabindex"})
_OF_INPUTS = frozenset({"checked", "name", "placeholder", "type", "value"})
ATTRIBUTES = _COMMON | _OF_INPUTS | {"href", "max", "open", "scope", "download"}
PREFIXES = ("aria-", "data-")
LINKS = ("/", "#", "http://", "https://")


def el(tag: str, *children: Children, **attributes: str | int | float | bool | None) -> Node:
    """One element. `cls` is the class; `data_x`, `aria_x` become `data-x`, `aria-x`.

    Attributes that are None or False are left out; children may be nodes or iterables of nodes.
    """
    if tag not in TAGS:
        raise ValueError(f"element <{tag}> is not one that pages may draw")
    return [tag, _attributes(attributes), list(_flat(children))]


def text_of(node: Node) -> str:
    """The visible text of a tree, elements separated by blanks."""
    if isinstance(node, str):
        return node
    return " ".join(part for part in (text_of(child) for child in node[2]) if part)


def _attributes(given: dict[str, Any]) -> dict[str, str]:
    kept: dict[str, str] = {}
    for key, value in given.items():
        if value is None or value is False:
            continue
        name = "class" if key == "cls" else key.replace("_", "-")
        if name not in ATTRIBUTES and not name.startswith(PREFIXES):
            raise ValueError(f"attribute {name} is not one that pages may set")
        if name == "href" and not _is_link(str(value)):
            continue
        kept[name] = "" if value is True else str(value)
    return kept


def _is_element(child: Children) -> TypeGuard[Node]:
    return isinstance(child, list) and len(child) == 3 and isinstance(child[1], dict)


def _is_link(href: str) -> bool:
    return href.startswith(LINKS) and not href.startswith("//")


def _flat(children: Iterable[Children]) -> Iterable[Node]:
    for child in children:
        if child is None:
            continue
        if isinstance(child, str) or (
            isinstance(child, list) and len(child) == 3 and isinstance(child[1], dict)
        ):
            yield child
        else:
            yield from _flat(child)
