"""What a person has to correct before a form can be sent: all of it beside the button, each also
beside its field.

`panel.js` puts the sentence of an element with `data_field` below the field of that id, and takes
it away when the field changes or the panel shows something else. A click on a field's name in the
list opens the fold it lies in and goes there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from app.ui.components.elements import Node, el
from app.ui.components.state import sentence
from speculators_core.errors import SpeclabError


class Correction(NamedTuple):
    """`element`: the id of the field's element; empty for what concerns no field of the form."""

    element: str
    label: str
    sentence: str


def corrections_tree(wrong: Sequence[Correction]) -> Node:
    title = "Correct this first" if len(wrong) == 1 else f"Correct these {len(wrong)} first"
    items = el("ul", (_item(one) for one in wrong))
    return el("div", el("strong", title), items, cls="notice error", role="alert")


def sentence_of(error: SpeclabError) -> str:
    """Its message and what to do, for a place that shows already where it is wrong."""
    return " ".join(sentence(part) for part in (error.message, error.hint) if part)


def _item(one: Correction) -> Node:
    if not one.element:
        return el("li", f"{one.label}: {one.sentence}" if one.label else one.sentence)
    name = el("button", one.label, cls="link", type="button", data_goto=one.element)
    return el("li", name, ": ", one.sentence, data_field=one.element, data_sentence=one.sentence)
