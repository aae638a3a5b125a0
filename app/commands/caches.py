"""`speclab caches`: what is kept to be quick the next time, and how it goes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.commands.output import Json, Misuse, emit, table

if TYPE_CHECKING:
    from app.services.caches import CacheView

_DAYS = 30.0


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("caches")(_caches)


def _caches(
    places: Annotated[
        list[Path] | None,
        typer.Argument(metavar="DIR", help="Further directories of prepared data to look in."),
    ] = None,
    clean: Annotated[bool, typer.Option("--clean", help="Remove what is old.")] = False,
    older_than: Annotated[
        float | None,
        typer.Option(metavar="DAYS", min=0, help=f"Unused for so long; {_DAYS:g} without it."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List caches with size, last use and users. What is in use is never removed."""
    from app.services import caches

    if older_than is not None and not clean:
        raise Misuse("--older-than goes with --clean", where="--older-than")
    named = tuple(places or ())
    if clean:
        removed = caches.clean(_DAYS if older_than is None else older_than, named)
        lines = _lines(removed) if removed else ["nothing is old enough, or all of it is in use"]
        document = {"removed": [cache.model_dump(mode="json") for cache in removed]}
        emit(document, as_json, lines)
        return
    found = caches.list_caches(named)
    document = {"caches": [cache.model_dump(mode="json") for cache in found]}
    emit(document, as_json, _lines(found) if found else ["there are no caches"])


def _lines(found: list[CacheView]) -> Iterator[str]:
    from speculators_core.data.capacity import in_words

    rows = [
        (in_words(c.size), f"{c.used_at:%Y-%m-%d %H:%M}", _users(c), c.about, c.path) for c in found
    ]
    yield from table(("size", "last used", "in use by", "what", "where"), rows)
    yield f"{in_words(sum(cache.size for cache in found))} in all"


def _users(cache: CacheView) -> str:
    if not cache.in_use:
        return "nobody"
    return ", ".join(cache.users) or "a process here"
