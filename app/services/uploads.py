"""Files that people upload: checked, kept under SPECLAB_HOME by content, and registered."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

from app.services import data_sets
from app.services.views import DataSetView
from app.settings import settings
from speculators_core.data.layouts import recognise
from speculators_core.data.rows import SUFFIXES, read_rows
from speculators_core.errors import DataError


def keep_chats(path: str | Path, name: str | None = None) -> DataSetView:
    """Register a file of chats or text (JSONL, JSON, Parquet; any layout) under `name`, default
    its own.

    The same content is kept once. Raises `DataError` with the row that is wrong; nothing is kept
    then.
    """
    source = Path(path)
    count = _count(source)
    if not count:
        raise DataError(
            "the file holds no chat",
            where=source.name,
            hint='a row is {"messages": [{"role": "user", "content": "…"}, …]}, or another layout',
        )
    suffix = source.suffix if source.suffix in SUFFIXES else ".jsonl"
    place = settings().home / "datasets" / data_sets.content_digest(source) / f"chats{suffix}"
    if not place.exists():
        _copy(source, place)
    return data_sets.register(place, name or source.stem, "chats", samples=count)


def _count(source: Path) -> int:
    """Rows that are chats or text; errors name the file as its owner knows it."""
    count = 0
    try:
        for row in read_rows(source):
            recognise(row.values, f"{source}:{row.number}")
            count += 1
    except DataError as error:
        where = (error.where or "").replace(str(source), source.name)
        raise DataError(error.message, where=where, hint=error.hint) from error
    return count


def _copy(source: Path, place: Path) -> None:
    """Beside its place first: a file that exists is complete."""
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
    try:
        shutil.copyfile(source, partial)
        partial.replace(place)
    finally:
        partial.unlink(missing_ok=True)
