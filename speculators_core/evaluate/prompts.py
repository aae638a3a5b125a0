"""Evaluation prompts: chats in any layout of `data.layouts`, and an optional `category`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from speculators_core.data.chats import Message
from speculators_core.data.layouts import Text, recognise
from speculators_core.data.rows import read_rows
from speculators_core.errors import DataError

UNNAMED = "all"


@dataclass(frozen=True)
class Prompt:
    messages: tuple[dict[str, Any], ...]
    category: str
    where: str


def read_prompts(file: Path, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts. Answers that end a chat are left off: the verifier writes its own.

    Raises `DataError` naming the line at fault, or where there is no prompt at all.
    """
    rows = islice(read_rows(file), limit)
    prompts = [_prompt(row.values, f"{file}:{row.number}") for row in rows]
    if not prompts:
        raise DataError(
            "the file holds no prompt",
            where=str(file),
            hint='one JSON object a line: {"prompt": "…", "category": "…"}',
        )
    return prompts


def _prompt(record: dict[str, Any], where: str) -> Prompt:
    category = record.get("category", UNNAMED)
    if not isinstance(category, str) or not category:
        raise DataError(f"category should be a name, found {category!r}", where=where)
    found = recognise(record, where)
    messages: list[Message] = [] if isinstance(found, Text) else list(found.messages)
    while messages and messages[-1].role == "assistant":
        messages.pop()
    if not any(message.content.strip() for message in messages):
        raise DataError("nothing is asked: no turn before the answer", where=where)
    return Prompt(tuple(message.as_dict() for message in messages), category, where)
