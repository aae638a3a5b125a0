"""Presets of the Train page: their values by kind, and what may be expected of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.services import demo
from app.ui.components.elements import Node, el
from speculators_core.params import JobKind
from speculators_core.training.presets import DEMO, PRESETS, Preset

Values = Mapping[JobKind, Mapping[str, Any]]
NAMES = [preset.name for preset in PRESETS]


def values_of(name: str) -> Values:
    """Parameters by kind; what is not named keeps its default."""
    chosen = _named(name)
    if chosen is DEMO:  # exactly the demo's, so that what it has made is used again
        return {stage.kind: stage.params for stage in demo.stages() if stage.kind in DEMO.params}
    return chosen.params


def expectation(name: str) -> Node:
    """What to expect of it, in words."""
    return el("p", el("strong", "What to expect: "), _named(name).expectation, cls="quiet")


def _named(name: str) -> Preset:
    return next((preset for preset in PRESETS if preset.name == name), DEMO)
