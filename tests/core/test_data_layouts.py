"""Rows are told apart by their keys: chats of four layouts, and plain text."""

from __future__ import annotations

from typing import Any

import pytest

from speculators_core.data.chats import Chat
from speculators_core.data.layouts import Text, recognise
from speculators_core.errors import DataError

ASKED = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def turns(row: dict[str, Any]) -> list[tuple[str, str]]:
    found = recognise(row, "f:1")
    assert isinstance(found, Chat)
    return [(message.role, message.content) for message in found.messages]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": ASKED},
        {"messages": ASKED, "prompt": "another", "text": "all of it"},
        {"conversation": ASKED, "language": "English"},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversations": [{"from": "User", "value": "q"}, {"from": "chatgpt", "value": "a"}]},
        {"id": "7", "data": ["q", "a"]},
        {"messages": ["q", "a"]},
        {"prompt": "q", "completion": "a"},
        {"prompt": "q", "response": "a"},
        {"prompt": ASKED[:1], "completion": ASKED[1:]},
        {"instruction": "q", "input": "", "output": "a", "text": "### q a"},
        {"question": "q", "answer": "a"},
        {"input": "q", "output": "a"},
    ],
)
def test_a_chat_is_found_in_each_layout(row: dict[str, Any]) -> None:
    assert turns(row) == [("user", "q"), ("assistant", "a")]


def test_an_instruction_takes_its_input_with_it() -> None:
    row = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
    assert turns(row)[0] == ("user", "Add.\n\n1 and 2")


def test_system_and_tools_stand_beside_any_layout() -> None:
    row = {
        "system": "be kind",
        "tools": '[{"name": "add"}]',
        "conversations": [
            {"from": "human", "value": "1+1?"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "2."},
        ],
    }
    assert [role for role, _ in turns(row)] == ["system", "user", "assistant", "tool", "assistant"]
    found = recognise(row, "f:1")
    assert isinstance(found, Chat)
    assert found.tools == ({"name": "add"},)
    assert found.messages[2].further["tool_calls"][0]["function"]["arguments"] == {"a": 1}


def test_a_question_alone_is_a_chat_without_an_answer() -> None:
    assert turns({"prompt": "q", "category": "maths"}) == [("user", "q")]


def test_a_chat_without_turns_is_left_to_be_skipped() -> None:
    assert turns({"conversations": [], "id": 1}) == []


def test_text_is_text() -> None:
    assert recognise({"text": "plain", "url": "x"}, "f:1") == Text("plain", "f:1")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"id": 1, "html": "x"}, "found the keys id, html"),
        ({}, "found the keys none"),
        ({"input": "alone"}, "no known layout"),
        ({"messages": "hello"}, "a list of turns, found str 'hello'"),
        ({"conversations": [{"from": "wizard", "value": "x"}]}, "'wizard'"),
        ({"conversations": [{"from": "human"}]}, "from and value, found the keys from"),
        ({"conversations": [{"from": "human", "value": "q"}, "a"]}, "found str 'a'"),
        ({"conversations": [{"from": "human", "value": 3}]}, "found int"),
        ({"prompt": "q", "answer": {"a": 1}}, "found dict"),
        ({"prompt": "q", "tools": "{"}, "tools is no JSON"),
    ],
)
def test_a_row_that_is_no_layout_names_its_place_and_keys(row: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says) as caught:
        recognise(row, "f.jsonl:3")
    assert caught.value.where is not None and caught.value.where.startswith("f.jsonl:3")
    if {"messages", "conversations"} & row.keys():
        assert caught.value.hint
    if "layout" in caught.value.message:
        assert "conversations" in str(caught.value.hint) and "completion" in str(caught.value.hint)
