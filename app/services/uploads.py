"""Files that people upload: checked, kept under SPECLAB_HOME by content, and registered."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.services import data_sets
from app.services.views import DataSetView
from app.settings import settings
from speculators_core.errors import DataError


def keep_chats(path: str | Path, name: str | None = None) -> DataSetView:
    """Register a JSONL file of chats (`messages` in each line) under `name`, default its own.

    The same content is kept once. Raises `DataError` with the line that is wrong; nothing is
    kept then.
    """
    source = Path(path)
    count = sum(1 for _ in _chats(source))
    if not count:
        raise DataError("the file holds no chat", where=source.name, hint=_EXPECTED)
    place = settings().home / "datasets" / data_sets.content_digest(source) / "chats.jsonl"
    if not place.exists():
        _copy(source, place)
    return data_sets.register(place, name or source.stem, "chats", samples=count)


_EXPECTED = 'each line is {"messages": [{"role": "user", "content": "…"}, …]}'


def _chats(source: Path) -> Iterator[Any]:
    with source.open(encoding="utf-8", errors="strict") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _chat(line, f"{source.name}, line {number}")
        except UnicodeDecodeError as error:
            raise DataError("the file is not UTF-8 text", where=source.name) from error


def _chat(line: str, where: str) -> Any:
    try:
        chat = json.loads(line)
    except ValueError as error:
        raise DataError(f"not JSON: {error}", where=where, hint=_EXPECTED) from error
    messages = chat.get("messages") if isinstance(chat, dict) else None
    if not isinstance(messages, list) or not messages:
        raise DataError("there are no `messages`", where=where, hint=_EXPECTED)
    return chat


def _copy(source: Path, place: Path) -> None:
    """Beside its place first: a file that exists is complete."""
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
    try:
        shutil.copyfile(source, partial)
        partial.replace(place)
    finally:
        partial.unlink(missing_ok=True)
