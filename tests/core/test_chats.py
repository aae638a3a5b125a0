"""Chats in JSON lines: what is read, what is skipped with a reason, what is refused with a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speculators_core.data.chats import Message, messages_of, read_chats
from speculators_core.errors import DataError


def chat(*turns: tuple[str, object]) -> dict:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


GOOD = chat(("user", "hello"), ("assistant", "hi"))


def written(folder: Path, *lines: object) -> Path:
    file = folder / "chats.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return file


def test_chats_come_in_file_order_with_the_line_they_are_from(tmp_path: Path) -> None:
    file = written(tmp_path, GOOD, "", chat(("user", "a"), ("assistant", "b")))
    read = read_chats([file])
    assert [c.where for c in read.chats] == [f"{file}:1", f"{file}:3"]
    assert read.chats[1].messages == (Message("user", "a"), Message("assistant", "b"))
    assert not read.skipped


def test_a_prompt_with_an_answer_is_a_chat(tmp_path: Path) -> None:
    read = read_chats([written(tmp_path, {"prompt": "2+2?", "answer": "4", "category": "maths"})])
    assert read.chats[0].as_dicts() == [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
    ]


def test_what_teaches_nothing_is_skipped_and_counted_by_reason(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        GOOD,
        {"prompt": "no answer"},
        chat(("system", "be kind")),
        chat(("user", "q"), ("assistant", "  ")),
        chat(("user", "q"), ("assistant", None)),
        chat(("assistant", "I speak first and alone")),
    )
    read = read_chats([file])
    assert len(read.chats) == 1
    assert read.skipped == {"no assistant turn": 2, "an empty answer": 2, "no user turn": 1}


def test_repeated_roles_and_tool_turns_are_left_to_the_template(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        chat(("user", "one"), ("user", "two"), ("assistant", "both")),
        chat(("assistant", "welcome"), ("user", "hi"), ("assistant", "hello")),
        chat(("user", "look"), ("assistant", "calling"), ("tool", "42"), ("assistant", "42")),
    )
    assert len(read_chats([file]).chats) == 3


def test_text_parts_are_joined(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    read = read_chats([written(tmp_path, chat(("user", parts), ("assistant", "c")))])
    assert read.chats[0].messages[0].content == "ab"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{not json", "not JSON"),
        ("[1, 2]", "found list"),
        ({"text": "plain"}, "found the fields text"),
        ({"messages": []}, "a list of turns"),
        ({"messages": ["hello"]}, "role and content"),
        (chat(("wizard", "x")), "'wizard'"),
        (chat(("user", 7)), "found int"),
        (chat(("user", [{"type": "image"}])), "found list"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_line_that_cannot_be_right_is_named(tmp_path: Path, line: object, says: str) -> None:
    file = written(tmp_path, GOOD, line)
    with pytest.raises(DataError) as caught:
        read_chats([file])
    assert says in caught.value.message
    assert caught.value.where is not None
    assert caught.value.where.startswith(f"{file}:2")


def test_an_empty_file_and_one_without_answers_say_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the data is empty"):
        read_chats([written(tmp_path)])
    with pytest.raises(DataError, match="1 × no assistant turn"):
        read_chats([written(tmp_path, {"prompt": "q"})])


def test_a_path_that_is_no_text_file_says_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read_chats([tmp_path / "missing.jsonl"])
    with pytest.raises(DataError, match="is a directory"):
        read_chats([tmp_path])
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00{}")
    with pytest.raises(DataError, match="not UTF-8"):
        read_chats([binary])


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    file = tmp_path / "bom.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert len(read_chats([file]).chats) == 1


def test_a_record_without_turns_is_refused_by_name() -> None:
    with pytest.raises(DataError, match="neither messages nor a prompt"):
        messages_of({}, "here")
