"""Rows of JSON lines, JSON arrays and Parquet; the format is in the bytes, not in the name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from speculators_core.data import rows as module
from speculators_core.data.rows import files_of, read_rows
from speculators_core.errors import DataError, Forbidden
from speculators_core.untrusted import check_links

ROWS: list[dict[str, Any]] = [{"text": f"Zeile {i} ü"} for i in range(5)]


def values(file: Path) -> list[dict[str, Any]]:
    return [row.values for row in read_rows(file)]


@pytest.mark.parametrize("form", ["lines", "array", "indented", "parquet", "bom"])
def test_every_format_gives_the_same_rows(tmp_path: Path, form: str) -> None:
    file = tmp_path / "data.json"
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), file)
    elif form == "lines":
        file.write_text("\n\n".join(json.dumps(row) for row in ROWS))
    else:
        indent = 2 if form == "indented" else None
        text = json.dumps(ROWS, indent=indent, ensure_ascii=False)
        file.write_text(text, encoding="utf-8-sig" if form == "bom" else "utf-8")
    found = list(read_rows(file))
    assert [row.values for row in found] == ROWS
    assert [row.done for row in found] == sorted(row.done for row in found)
    assert 0.9 < found[-1].done <= 1


def test_an_array_is_decoded_as_it_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 7)
    file = tmp_path / "a.json"
    file.write_text(json.dumps(ROWS, indent=1))
    assert values(file) == ROWS
    file.write_text("[ ]")
    assert values(file) == []


def test_nulls_of_columns_are_no_keys(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "q", "name": None}, {"role": "user", "name": "x"}]
    pq.write_table(pa.Table.from_pylist([{"messages": turns, "tools": None}]), tmp_path / "p")
    assert values(tmp_path / "p") == [
        {"messages": [{"role": "user", "content": "q"}, {"role": "user", "name": "x"}]}
    ]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"a": 1}\n{nope\n', "not JSON"),
        (b'{"a": 1}\n[1]\n', r"a JSON object, found list \[1\]"),
        (b'{"a": 1}\n\xff\xfe{}\n', "not UTF-8"),
        (b'{"a": 1}\n' + b"[" * 100_000, "not JSON"),
        (b'[{"a": 1}, {"b": ', "item 2 is not JSON"),
        (b'[{"a": 1} {"b": 2}]', "expected ','"),
        (b'[{"a": 1}, 7]', "found int"),
        (b'[{"a": 1}', "found 'the end'"),
        (b'["\xff', "not UTF-8"),
        (b"PAR1 and nothing more", "Parquet"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "f.jsonl"
    file.write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        values(file)
    assert caught.value.where is not None and caught.value.where.startswith(str(file))
    assert caught.value.hint


def test_a_path_that_is_no_file_says_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        values(tmp_path / "missing.jsonl")
    with pytest.raises(DataError, match="is a directory"):
        values(tmp_path)


def laid_out(place: Path, *names: str) -> Path:
    for name in names:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("{}")
    return place


def test_a_directory_means_the_files_of_its_split(tmp_path: Path) -> None:
    place = laid_out(
        tmp_path,
        "README.md",
        ".cache/train.jsonl",
        "data/train-00000-of-00002.parquet",
        "data/train-00001-of-00002.parquet",
        "data/train_gen-00000-of-00001.parquet",
        "data/test-00000-of-00001.parquet",
    )

    def named(split: str | None) -> list[str]:
        return [file.name for file in files_of(place, split)]

    assert named(None) == ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    assert named("train_gen") == ["train_gen-00000-of-00001.parquet"]
    with pytest.raises(DataError, match=r"expected files named validation .* found 4 data files"):
        named("validation")


def test_several_folders_of_a_split_want_a_choice(tmp_path: Path) -> None:
    place = laid_out(tmp_path, "main/train.jsonl", "socratic/train.jsonl")
    with pytest.raises(DataError, match=r"in one folder, found them in main, socratic") as caught:
        files_of(place, None)
    assert "--split socratic/train" in str(caught.value.hint)
    assert files_of(place, "main/train") == [place / "main/train.jsonl"]


def test_the_only_file_of_a_directory_needs_no_split_and_a_file_has_none(tmp_path: Path) -> None:
    place = laid_out(tmp_path, "sft.jsonl")
    assert files_of(place, None) == [place / "sft.jsonl"]
    with pytest.raises(DataError, match="of a single file"):
        files_of(place / "sft.jsonl", "train")


def test_a_file_without_line_breaks_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speculators_core.data.rows._LARGEST_ROW", 100)
    file = tmp_path / "broken.jsonl"
    file.write_text('{"text": "' + "a" * 1000)
    with pytest.raises(DataError, match="longer than 100 bytes"):
        list(read_rows(file))


def test_a_link_out_of_a_data_directory_is_found_at_any_depth_that_is_read(tmp_path: Path) -> None:
    outside, place = tmp_path / "secret.jsonl", tmp_path / "data"
    outside.write_text("{}\n")
    for folder in (place / "main", place / ".git"):
        folder.mkdir(parents=True)
        (folder / "train.jsonl").symlink_to(outside)
    assert files_of(place, "train") == [place / "main" / "train.jsonl"]
    with pytest.raises(Forbidden, match=r"train\.jsonl is a link to"):
        check_links(place, [])
