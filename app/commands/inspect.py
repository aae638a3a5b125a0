"""`speclab inspect CHECKPOINT`: what a checkpoint is and what each tensor would become."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import typer

from app.commands.conversion import doubt_lines
from app.commands.core import Flags, path_of
from app.commands.flags import parse, with_flags
from app.commands.output import Json, emit, table
from speculators_core.params import InspectParams


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("inspect")(with_flags(_inspect, InspectParams, positional="checkpoint"))


def _inspect(flags: Flags, as_json: Json = False) -> None:
    """Show a checkpoint's layout, what every tensor would become, and what is doubtful.

    The flags of `speclab convert` show what a conversion with them would do.
    """
    from speculators_core.conversion.inspect import inspect

    settled = parse(InspectParams, flags).model_dump()
    checkpoint, verifier = settled.pop("checkpoint"), settled.pop("verifier")
    target = path_of(verifier, "verifier") if verifier else None
    found = inspect(path_of(checkpoint, "checkpoint"), target, settled=settled)
    shown = found.model_dump(mode="json")
    emit(shown, as_json, _lines(shown))


def _lines(found: dict[str, Any]) -> Iterable[str]:
    yield f"layout: {found['layout']}"
    yield ""
    for doubt in found["doubts"]:
        yield from doubt_lines(doubt)
    yield from [] if found["doubts"] else ["no doubts"]
    yield from (f"warning: {warning}" for warning in found["warnings"])
    yield ""
    rows = [
        (t["source"], t["target"], "×".join(map(str, t["shape"] or ())), t["dtype"], t["reason"])
        for t in found["tensors"]
    ]
    yield from table(("tensor", "becomes", "shape", "type", "why"), rows)
    yield ""
    fields = [(name, f["value"], f["origin"]) for name, f in found["config"].items()]
    yield from table(("field", "value", "from"), fields)
