"""Turns of a chat: what is kept of them, and what is refused."""

from __future__ import annotations

import pytest

from speculators_core.data.chats import Chat, Message, messages_of, teaches_nothing, tools_of
from speculators_core.errors import DataError


def chat(*turns: tuple[str, str]) -> Chat:
    return Chat(tuple(Message(role, content) for role, content in turns), "here")


def test_text_parts_are_joined_and_null_is_empty() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = messages_of(
        [{"role": "user", "content": parts}, {"role": "assistant", "content": None}], "here"
    )
    assert [m.content for m in found] == ["ab", ""]


def test_reasoning_and_calls_are_handed_to_the_template_with_arguments_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    found = messages_of(
        [
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "content": "2", "tool_call_id": "1", "hashed_ip": "x"},
        ],
        "here",
    )
    called, told = (message.as_dict() for message in found)
    assert called["reasoning_content"] == "hm"
    assert called["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert told == {"role": "tool", "content": "2", "tool_call_id": "1"}


@pytest.mark.parametrize("tools", ['[{"name": "add"}]', [{"name": "add"}]])
def test_tools_may_be_written_as_json_text(tools: object) -> None:
    assert tools_of(tools, "here") == ({"name": "add"},)
    assert tools_of(None, "here") == ()


@pytest.mark.parametrize(
    ("turns", "says"),
    [
        ([], "a list of turns"),
        ("hello", "a list of turns"),
        (["hello"], "role and content, found str 'hello'"),
        ([{"role": "user"}], "role and content, found the keys role"),
        ([{"role": "wizard", "content": "x"}], "'wizard'"),
        ([{"role": "user", "content": 7}], "found int"),
        ([{"role": "user", "content": [{"type": "image"}]}], "found list"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "function with a name"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "a tool call are no JSON",
        ),
    ],
)
def test_turns_that_cannot_be_right_are_named(turns: object, says: str) -> None:
    with pytest.raises(DataError, match=says) as caught:
        messages_of(turns, "f.jsonl:2")
    assert caught.value.where is not None and caught.value.where.startswith("f.jsonl:2")
    if "turn" in caught.value.message and "found" in caught.value.message:
        assert caught.value.hint


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ((("user", "q"), ("assistant", "a")), None),
        ((("user", "one"), ("user", "two"), ("assistant", "both")), None),
        ((("assistant", "welcome"), ("user", "hi"), ("assistant", "hello")), None),
        ((("user", "q"), ("assistant", "calling"), ("tool", "42"), ("assistant", "42")), None),
        ((("system", "be kind"),), "no assistant turn"),
        ((("user", "q"),), "no assistant turn"),
        ((("assistant", "I speak first and alone"),), "no user turn"),
        ((("user", "q"), ("assistant", "  ")), "an empty answer"),
        ((("user", ""), ("assistant", "a")), "an empty user turn"),
    ],
)
def test_b5_every_order_of_turns_is_kept_or_has_a_reason(
    turns: tuple[tuple[str, str], ...], reason: str | None
) -> None:
    assert teaches_nothing(chat(*turns)) == reason
