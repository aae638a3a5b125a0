"""Evaluation prompts in JSON lines: `prompt` or `messages`, and an optional `category`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculators_core.data.chats import messages_of, read_records
from speculators_core.errors import DataError

UNNAMED = "all"


@dataclass(frozen=True)
class Prompt:
    messages: tuple[dict[str, str], ...]
    category: str
    where: str


def read_prompts(file: Path, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts. Answers that end a chat are left off: the verifier writes its own.

    Raises `DataError` naming the line at fault, or where there is no prompt at all.
    """
    prompts = [_prompt(record, where) for where, record in read_records(file)][:limit]
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
    messages = [{"role": m.role, "content": m.content} for m in messages_of(record, where)]
    if "prompt" in record and "messages" not in record:
        messages = messages[:1]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not any(message["content"].strip() for message in messages):
        raise DataError("nothing is asked: no turn before the answer", where=where)
    return Prompt(tuple(messages), category, where)
