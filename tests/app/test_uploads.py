"""Uploaded chats are checked, kept once under their content, and registered."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
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


def test_other_layouts_and_formats_are_kept_as_they_are(
    sqlite_store: str, home: Path, tmp_path: Path
):
    shared = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    array = tmp_path / "shared.json"
    array.write_text(json.dumps([{"conversations": shared}] * 3))
    table = tmp_path / "pairs.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": "q", "response": "a"}]), table)
    for file, count in ((array, 3), (table, 1)):
        kept = uploads.keep_chats(file)
        assert kept.samples == count and Path(kept.path).suffix == file.suffix
        assert Path(kept.path).read_bytes() == file.read_bytes()


def test_the_same_content_is_kept_once(sqlite_store: str, tmp_path: Path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(CHAT)
    paths = {uploads.keep_chats(tmp_path / name).path for name in ("a.jsonl", "b.jsonl")}
    assert len(paths) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no chat"),
        (b"{nope", "(bad.jsonl:1)"),
        (f"{CHAT}\n[1]\n".encode(), "(bad.jsonl:2)"),
        (b'{"id": 1, "body": "x"}', "found the keys id, body"),
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
