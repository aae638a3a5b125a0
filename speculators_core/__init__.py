"""EAGLE-3 in PyTorch: convert, train, evaluate and decode with speculators.

No database, no web, no queue. The names below load torch only when they are first used, so the
light modules (`config`, `params`, `errors`, `conversion.inspect`) stay cheap to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from speculators_core.checkpoint import load_speculator
    from speculators_core.conversion.convert import convert
    from speculators_core.decode.engine import SpeculativeDecoder
    from speculators_core.training.train import train

_HOMES = {
    "SpeculativeDecoder": "speculators_core.decode.engine",
    "convert": "speculators_core.conversion.convert",
    "load_speculator": "speculators_core.checkpoint",
    "train": "speculators_core.training.train",
}

__all__ = ["SpeculativeDecoder", "convert", "load_speculator", "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(_HOMES[name]), name)
