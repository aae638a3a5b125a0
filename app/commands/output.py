"""What a command says: one JSON document or readable lines on stdout; all else on stderr."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer

from speculators_core.errors import InputError, SpeclabError

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


class Misuse(InputError):
    """A flag or argument that can't be right: exit status 2."""

    kind = "usage"


def emit(document: Any, as_json: bool, lines: Iterable[str] = ()) -> None:
    """The result of a command. Without `lines`, a mapping is shown as names and values."""
    if as_json:
        typer.echo(json.dumps(document, default=str, ensure_ascii=False))
        return
    for line in lines or _pairs(document):
        typer.echo(line)


def say(text: str) -> None:
    """One line for the person watching."""
    typer.echo(text, err=True)


def fail(error: SpeclabError, as_json: bool) -> int:
    """Report an error; the exit status that goes with it."""
    if as_json:
        typer.echo(json.dumps({"error": error.as_dict()}, ensure_ascii=False))
    else:
        say(f"error: {error.message}")
        if error.where:
            say(f"  where: {error.where}")
        if error.hint:
            say(f"  hint:  {error.hint}")
    return 2 if isinstance(error, Misuse) else 1


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Aligned columns, as wide as they need to be."""
    cells = [list(titles), *([("" if c is None else str(c)) for c in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(titles))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def _pairs(document: Any) -> list[str]:
    if not isinstance(document, Mapping):
        return [str(document)]
    width = max((len(str(name)) for name in document), default=0)
    return [f"{str(name).ljust(width)}  {_short(value)}" for name, value in document.items()]


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict | list):
        return json.dumps(value, default=str, ensure_ascii=False)
    return str(value)
