"""The token view: an answer as it is decoded, each token coloured by who proposed it.

A decoding step shows its accepted draft tokens, then the first rejected one and the unused ones
behind it (struck through, at their position), then the verifier's own token.
"""

from __future__ import annotations

from typing import Any

from app.services.playground import PlaygroundUpdate
from app.services.views import GenerationView
from app.ui.components.elements import Node, el
from app.ui.components.live import Live


class TokenView(Live):
    """Takes `PlaygroundUpdate` deltas. Its `input` event asks for the whole answer again, after
    the end of a stream of which the browser missed a part."""

    SCRIPT = "token_view.js"
    ROOT = "sl-tokens"


def idle_payload(title: str, message: str, *, plain: bool = False) -> dict[str, Any]:
    """An empty view that says what to do."""
    return {"run": "", "seq": 0, "reset": True, "title": title, "message": message, "plain": plain}


def token_payload(
    update: PlaygroundUpdate, title: str, *, plain: bool = False, coloured: bool = True
) -> dict[str, Any]:
    """One update as the view takes it. Not `coloured`: no step has arrived so far, so the answer's
    bare text goes along."""
    data = update.model_dump(mode="json", exclude={"text"})
    return data | {"title": title, "plain": plain, "text": "" if coloured else update.text}


def ended_payload(state: str, message: str = "") -> dict[str, Any]:
    """Only a new state for what is under way: `seq` None leaves the tokens alone."""
    return {"seq": None, "state": state, "message": message}


def snapshot_payload(shown: GenerationView, title: str) -> dict[str, Any]:
    """A stored answer, whole."""
    return {
        "run": shown.id,
        "seq": 0,
        "reset": True,
        "steps": shown.steps,
        "text": "" if shown.steps else shown.text,
        "numbers": shown.numbers,
        "state": shown.numbers.get("state", "done"),
        "message": "",
        "title": title,
        "plain": shown.plain,
    }


def legend() -> Node:
    """What the colours and shapes mean."""
    entries = (
        ("accepted", "accepted draft", "span"),
        ("own", "the verifier's own", "span"),
        ("rejected", "rejected draft", "del"),
        ("unverified", "drafted after it, unused", "del"),
    )
    return el(
        "ul",
        (el("li", el(tag, name, cls=f"tok {cls}")) for cls, name, tag in entries),
        cls="legend",
        aria_label="Legend",
    )
