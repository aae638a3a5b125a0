"""Chats as OpenAI's API writes them: `{"messages": [{"role", "content", …}, …], "tools"?}`.

Calls of tools and reasoning are kept, for a chat template may render them. Roles need not
alternate: whether a template takes such a chat, it says itself. Light: no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from speculators_core.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "reasoning", "thinking")
"""What chat templates call the thoughts before an answer."""
_EXAMPLE = '{"role": "user", "content": "…"}'
_KEPT = ("name", "tool_call_id", *REASONING)


@dataclass(frozen=True)
class Message:
    """A turn. `further`: what a template may render beside the text, tool calls and reasoning."""

    role: str
    content: str
    further: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not self.content.strip() and not self.further.get("tool_calls")

    def as_dict(self) -> dict[str, Any]:
        return {"role": self.role, "content": self.content, **self.further}


@dataclass(frozen=True)
class Chat:
    """One conversation, the tools on offer in it, and the `FILE:ROW` that it came from."""

    messages: tuple[Message, ...]
    where: str
    tools: tuple[Mapping[str, Any], ...] = ()

    def as_dicts(self) -> list[dict[str, Any]]:
        """What a chat template takes."""
        return [message.as_dict() for message in self.messages]


def teaches_nothing(chat: Chat) -> str | None:
    """Why a chat is skipped, or None."""
    answers = [m for m in chat.messages if m.role == "assistant"]
    if not answers:
        return "no assistant turn"
    if all(m.role in ("system", "developer", "assistant") for m in chat.messages):
        return "no user turn"
    if any(answer.is_empty for answer in answers):
        return "an empty answer"
    if any(not m.content.strip() for m in chat.messages if m.role == "user"):
        return "an empty user turn"
    return None


def messages_of(messages: Any, where: str) -> tuple[Message, ...]:
    """A list of turns, checked. Raises `DataError` naming the turn at fault."""
    if not isinstance(messages, list) or not messages:
        raise no_turns("messages", messages, where)
    return tuple(_message(m, f"{where}: messages[{i}]") for i, m in enumerate(messages))


def tools_of(tools: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    """The tools on offer: a list of objects, or one written as JSON text."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError) as error:
            raise DataError(f"tools is no JSON: {error}", where=where) from error
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"tools should be a list of objects, found {tools!r}", where=where)
    return tuple(tools)


def no_turns(key: str, found: Any, where: str) -> DataError:
    """What stands where a list of turns should."""
    return DataError(
        f"{key} should be a list of turns, found {found_in_words(found)}",
        where=where,
        hint=f'write the turns one by one: "{key}": [{{"role": "user", "content": "…"}}, '
        '{"role": "assistant", "content": "…"}]; text alone goes under "text"',
    )


def wrong_turn(needed: str, found: Any, where: str, example: str) -> DataError:
    """A turn without what it needs."""
    return DataError(
        f"a turn needs {needed}, found {found_in_words(found)}",
        where=where,
        hint=f"write it as {example}, or leave the row out",
    )


def found_in_words(value: Any) -> str:
    """An object by its keys, anything else as it is, cut."""
    if isinstance(value, Mapping):
        return f"the keys {', '.join(map(str, value))}"[:80] if value else "an empty object"
    return f"{type(value).__name__} {value!r:.60}"


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict) or "role" not in value:
        raise wrong_turn("role and content", value, where, _EXAMPLE)
    if value["role"] not in ROLES:
        raise DataError(
            f"the role is {value['role']!r}, expected one of {', '.join(ROLES)}",
            where=where,
            hint="rename the role, or leave the row out",
        )
    if "content" not in value and not value.get("tool_calls"):
        raise wrong_turn("role and content", value, where, _EXAMPLE)
    further = {name: value[name] for name in _KEPT if isinstance(value.get(name), str)}
    if value.get("tool_calls"):
        further["tool_calls"] = _calls(value["tool_calls"], where)
    return Message(value["role"], _text(value.get("content"), where), further)


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Calls with arguments as objects, as vLLM hands them to a template."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DataError("tool_calls should be a list of objects", where=where)
    result = []
    for call in calls:
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError("a tool call needs a function with a name", where=where)
        arguments = _arguments(function.get("arguments"), where)
        result.append({**call, "function": {**function, "arguments": arguments}})
    return result


def _arguments(arguments: Any, where: str) -> Any:
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"the arguments of a tool call are no JSON: {error}", where=where
        ) from error


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
        hint="images can't be trained on",
    )
