"""Presets of the training page: what differs from the defaults, for each kind of the chain."""

from __future__ import annotations

from typing import Any

from app.services import demo
from speculators_core.params import JobKind

DEFAULT, QUICK, DEMO = PRESETS = ("Default", "Quick", "Demo")

_QUICK: dict[JobKind, dict[str, Any]] = {
    JobKind.SELF_WRITE: {"samples": 48, "held_out": 8, "max_answer_tokens": 48},
    JobKind.PREPARE: {"draft_vocab_size": 2048},
    JobKind.TRAIN: {"epochs": 4, "max_minutes": 4.0, "validate_every": 20},
}


def preset_values(name: str) -> dict[JobKind, dict[str, Any]]:
    """Parameters by kind; what is not named keeps its default."""
    if name == QUICK:
        return _QUICK
    if name == DEMO:
        return {stage.kind: dict(stage.params) for stage in demo.stages() if stage.kind in _QUICK}
    return {}
