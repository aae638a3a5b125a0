"""Uploaded chats are checked, kept once under their content, and registered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.services import data_sets, uploads
from speculators_core.errors import DataError

CHAT = json.dumps({"messages": [{"role": "user", "content": "hi"}]})


def test_chats_are_kept_under_the_home_and_registered(
    sqlite_store: str, home: Path, tmp_path: Path
):
    file = tmp_path / "mine.jsonl"
    file.write_text(f"{CHAT}\n\n{CHAT}\n")
    kept = uploads.keep_chats(file)
    assert (kept.name, kept.kind, kept.samples) == ("mine", "chats", 2)
    assert Path(kept.path).is_relative_to(home / "datasets")
    assert Path(kept.path).read_text() == file.read_text()


def test_the_same_content_is_kept_once(sqlite_store: str, tmp_path: Path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(CHAT)
    paths = {uploads.keep_chats(tmp_path / name).path for name in ("a.jsonl", "b.jsonl")}
    assert len(paths) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no chat"),
        (b"{nope", "line 1"),
        (f"{CHAT}\n[1]\n".encode(), "line 2"),
        (b'{"messages": []}', "no `messages`"),
        (b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_a_file_that_holds_no_chats_is_refused_and_leaves_nothing(
    sqlite_store: str, home: Path, tmp_path: Path, content: bytes, words: str
):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content)
    with pytest.raises(DataError) as refused:
        uploads.keep_chats(file)
    assert words in str(refused.value)
    assert data_sets.list_data_sets() == []
    assert not (home / "datasets").exists()
