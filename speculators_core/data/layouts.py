"""What a row of data is, told from its keys: a chat in one of four layouts, or plain text.

    messages, conversations,     turns: OpenAI's role/content, ShareGPT's from/value, or strings
    conversation, data           that alternate (UltraChat)
    prompt, instruction,         a question, with completion, response, answer or output beside
    question, query, input       it; instruction takes input with it
    text                         plain text

The first of these that a row has is what it is read as. `tools` and `system` stand beside any
chat. Light: no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from speculators_core.data.chats import (
    Chat,
    Message,
    found_in_words,
    messages_of,
    no_turns,
    tools_of,
    wrong_turn,
)
from speculators_core.errors import DataError

TURNS = ("messages", "conversations", "conversation", "data")
QUESTIONS = ("prompt", "instruction", "question", "query", "input")
ANSWERS = ("completion", "response", "answer", "output")
TEXT = "text"
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}


@dataclass(frozen=True)
class Text:
    """Plain text: the model is taken to have written all of it."""

    text: str
    where: str


def recognise(row: Mapping[str, Any], where: str) -> Chat | Text:
    """The chat or text that a row holds. Raises `DataError` naming the keys that were found."""
    tools = tools_of(row.get("tools"), where)
    for key in TURNS:
        if isinstance(row.get(key), list):
            turns = _turns(row[key], f"{where}: {key}") if row[key] else ()
            return Chat(_told(row, turns), where, tools)
        if key in row and key != "data":
            raise no_turns(key, row[key], where)
    question = next((key for key in QUESTIONS if key in row), None)
    answer = next((key for key in ANSWERS if row.get(key) is not None), None)
    if question and (answer or question != "input"):
        return Chat(_told(row, _pair(row, question, answer, where)), where, tools)
    if isinstance(row.get(TEXT), str):
        return Text(row[TEXT], where)
    raise DataError(
        f"the row has no known layout: found the keys {', '.join(map(str, row)) or 'none'}",
        where=where,
        hint=f"expected {', '.join(TURNS)} (turns), {' or '.join(QUESTIONS)} (with "
        f"{' or '.join(ANSWERS)}), or {TEXT}",
    )


def _told(row: Mapping[str, Any], turns: tuple[Message, ...]) -> tuple[Message, ...]:
    """The turns, with the row's own system text before them."""
    system = row.get("system")
    if not isinstance(system, str) or not system.strip() or not turns:
        return turns
    return turns if turns[0].role == "system" else (Message("system", system), *turns)


def _turns(turns: list[Any], where: str) -> tuple[Message, ...]:
    if all(isinstance(turn, str) for turn in turns):
        return tuple(
            Message("assistant" if i % 2 else "user", text) for i, text in enumerate(turns)
        )
    if isinstance(turns[0], dict) and "from" in turns[0]:
        return tuple(_sharegpt(turn, f"{where}[{i}]") for i, turn in enumerate(turns))
    return messages_of(turns, where)


def _sharegpt(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
        raise wrong_turn("from and value", turn, where, '{"from": "human", "value": "…"}')
    role = SHAREGPT_ROLES.get(str(turn["from"]).lower())
    if role is None:
        raise DataError(
            f"a turn is from {turn['from']!r}, expected one of {', '.join(SHAREGPT_ROLES)}",
            where=where,
            hint="rename it, or leave the row out",
        )
    value = "" if turn["value"] is None else turn["value"]
    if not isinstance(value, str):
        raise DataError(
            f"value should be text, found {found_in_words(value)}",
            where=where,
            hint="put the turn's text there as a string, or leave the row out",
        )
    return (
        _call(value, where)
        if str(turn["from"]).lower() == "function_call"
        else Message(role, value)
    )


def _call(value: str, where: str) -> Message:
    """ShareGPT writes the call of a function as the JSON of its name and arguments."""
    try:
        function = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the function call is no JSON: {error}", where=where) from error
    call = {"type": "function", "function": function}
    return messages_of([{"role": "assistant", "tool_calls": [call]}], where)[0]


def _pair(
    row: Mapping[str, Any], question: str, answer: str | None, where: str
) -> tuple[Message, ...]:
    asked = _side(row[question], "user", f"{where}: {question}")
    extra = row.get("input")
    if question == "instruction" and isinstance(extra, str) and extra.strip():
        asked = (Message("user", f"{row[question]}\n\n{extra}"),)
    if answer is None:
        return asked
    return (*asked, *_side(row[answer], "assistant", f"{where}: {answer}"))


def _side(value: Any, role: str, where: str) -> tuple[Message, ...]:
    """One side of a pair: a text, or turns."""
    if isinstance(value, str):
        return (Message(role, value),)
    if isinstance(value, list):
        return messages_of(value, where)
    raise DataError(f"expected text, found {type(value).__name__}", where=where)
