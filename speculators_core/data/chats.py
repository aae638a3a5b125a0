"""Chats in JSON lines: `{"messages": [{"role", "content"}, …]}`, or `{"prompt", "answer"?}`.

A file that can't be right (no JSON, no messages, an unknown role) is a `DataError` that names the
line. A chat that is right but teaches nothing (no answer, an empty one) is skipped and counted
with its reason. Roles need not alternate: whether a template takes such a chat, it says itself.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speculators_core.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True)
class Chat:
    """One conversation and the `FILE:LINE` that it came from."""

    messages: tuple[Message, ...]
    where: str

    def as_dicts(self) -> list[dict[str, str]]:
        """What a chat template takes."""
        return [{"role": m.role, "content": m.content} for m in self.messages]


@dataclass
class Chats:
    """What was read: usable chats, and how many were skipped for which reason."""

    chats: list[Chat] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)


def read_chats(files: Iterable[str | Path]) -> Chats:
    """Training chats of all `files` in order. Raises `DataError` where none is usable."""
    result = Chats()
    names = [Path(file) for file in files]
    for file in names:
        for where, record in read_records(file):
            chat = Chat(messages_of(record, where), where)
            reason = _teaches_nothing(chat)
            if reason:
                result.skipped[reason] += 1
            else:
                result.chats.append(chat)
    if not result.chats:
        reasons = ", ".join(f"{n} × {reason}" for reason, n in result.skipped.items())
        raise DataError(
            f"no chat can be trained on{': ' + reasons if reasons else ': the data is empty'}",
            where=", ".join(str(file) for file in names),
            hint="each line needs messages with a user turn and an assistant's answer",
        )
    return result


def read_records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(`FILE:LINE`, object) of each line that is not blank."""
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{file}:{number}", _object(line, f"{file}:{number}")
    except FileNotFoundError:
        raise DataError(
            "the data file does not exist", where=str(file), hint="give the path of a JSONL file"
        ) from None
    except IsADirectoryError:
        raise DataError("the data is a directory, expected a JSONL file", where=str(file)) from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"the file is not UTF-8 text (byte {error.start})",
            where=str(file),
            hint="one JSON object a line, as UTF-8",
        ) from error
    except OSError as error:
        raise DataError(f"the data can't be read: {error.strerror}", where=str(file)) from error


def messages_of(record: dict[str, Any], where: str) -> tuple[Message, ...]:
    """The messages of a record: its `messages`, or its `prompt` (and `answer`) as turns."""
    if "messages" in record:
        messages = record["messages"]
        if not isinstance(messages, list) or not messages:
            raise DataError(f"messages should be a list of turns, found {messages!r}", where=where)
        return tuple(_message(m, f"{where}: messages[{i}]") for i, m in enumerate(messages))
    if isinstance(record.get("prompt"), str):
        turns = [Message("user", record["prompt"])]
        if isinstance(record.get("answer"), str):
            turns.append(Message("assistant", record["answer"]))
        return tuple(turns)
    raise DataError(
        f"neither messages nor a prompt, found the fields {', '.join(record) or 'none'}",
        where=where,
        hint='{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", …}]}',
    )


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"the line is not JSON: {error}", where=where, hint="one JSON object a line"
        ) from error
    if not isinstance(value, dict):
        raise DataError(f"expected a JSON object, found {type(value).__name__}", where=where)
    return value


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict) or "role" not in value or "content" not in value:
        raise DataError("a turn needs role and content", where=where)
    if value["role"] not in ROLES:
        raise DataError(
            f"the role is {value['role']!r}, expected one of {', '.join(ROLES)}", where=where
        )
    return Message(value["role"], _text(value["content"], where))


def _text(content: Any, where: str) -> str:
    """Plain text, or the text parts of a list of parts."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise DataError(
        f"content should be text, found {type(content).__name__}",
        where=where,
        hint="images and tool calls can't be trained on",
    )


def _teaches_nothing(chat: Chat) -> str | None:
    """Why a chat is skipped, or None."""
    answers = [m for m in chat.messages if m.role == "assistant"]
    if not answers:
        return "no assistant turn"
    if all(m.role in ("system", "developer", "assistant") for m in chat.messages):
        return "no user turn"
    if any(not m.content.strip() for m in answers):
        return "an empty answer"
    return None
