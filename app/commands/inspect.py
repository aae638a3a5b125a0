"""`speclab inspect CHECKPOINT`: what a checkpoint is and what each tensor would become."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from app.commands.core import path_of
from app.commands.output import Json, emit, table


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("inspect")(_inspect)


def _inspect(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Path, hub id or registered name.")
    ],
    verifier: Annotated[
        str | None, typer.Option(help="The model it drafts for; settles some doubts.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a checkpoint's layout, what every tensor would become, and what is doubtful."""
    from speculators_core.conversion.inspect import inspect

    target = path_of(verifier, "verifier") if verifier else None
    found = inspect(path_of(checkpoint, "checkpoint"), target).model_dump(mode="json")
    emit(found, as_json, _lines(found))


def _lines(found: dict[str, Any]) -> Iterable[str]:
    yield f"layout: {found['layout']}"
    yield ""
    rows = [
        (t["source"], t["target"], "×".join(map(str, t["shape"] or ())), t["dtype"], t["reason"])
        for t in found["tensors"]
    ]
    yield from table(("tensor", "becomes", "shape", "type", "why"), rows)
    yield ""
    fields = [(name, f["value"], f["origin"]) for name, f in found["config"].items()]
    yield from table(("field", "value", "from"), fields)
    yield ""
    yield from [_doubt(doubt) for doubt in found["doubts"]] or ["no doubts"]


def _doubt(doubt: dict[str, Any]) -> str:
    choices = "; ".join(str(choice) for choice in doubt["choices"])
    return f"doubt: {doubt['about']}" + (f" (choose: {choices})" if choices else "")
