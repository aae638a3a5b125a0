"""Sources of rows: files, directories, and data sets of a stand-in hub; never the real one."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from speculators_core.data.sources import open_source, take
from speculators_core.errors import DataError, NotFound, Unavailable
from tests.core.stand_in_hub import StandInHub, stand_in_hub

ROWS = [{"prompt": f"q {i}", "answer": "a"} for i in range(6)]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with stand_in_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def parquet(rows: list[dict[str, str]]) -> bytes:
    content = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), content)
    return content.getvalue()


def lines(rows: list[dict[str, str]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_rows_are_numbered_over_all_files_of_a_source(tmp_path: Path) -> None:
    for number, part in enumerate((ROWS[:4], ROWS[4:])):
        (tmp_path / f"train-0000{number}-of-00002.jsonl").write_text(lines(part))
    taken = list(take([open_source(str(tmp_path))], seed=0))
    assert [row.number for row in taken] == [1, 2, 3, 4, 5, 6]
    assert [row.values for row in taken] == ROWS
    assert taken[4].where.endswith("train-00001-of-00002.jsonl:1")
    done = [row.done for row in taken]
    assert done == sorted(done) and done[-1] == pytest.approx(1)


def test_equal_bytes_are_equal_sources_wherever_they_lie(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.jsonl", "b.json")]
    for file in files:
        file.write_text(lines(ROWS))
    one, other = (open_source(str(file)) for file in files)
    assert one.digest == other.digest
    files[1].write_text(lines(ROWS[:5]))
    assert other.changed and open_source(str(files[1])).digest != one.digest


def test_a_data_set_of_the_hub_is_its_files_of_the_split(hub: StandInHub) -> None:
    repository = hub.add(
        "org/chats",
        {
            "README.md": b"# chats",
            "data/train-00000-of-00002.parquet": parquet(ROWS[:3]),
            "data/train-00001-of-00002.parquet": parquet(ROWS[3:]),
            "data/test-00000-of-00001.parquet": parquet(ROWS[:1]),
        },
    )
    source = open_source("org/chats")
    assert [row.values for row in take([source], 0)] == ROWS
    assert not hub.asked_for("README.md") and not hub.asked_for("test-0000")
    assert len(list(take([open_source("org/chats", "test")], 0))) == 1
    pinned = open_source(f"org/chats@{repository.commit}")
    assert pinned.digest == source.digest
    asked = len(hub.asked_for("resolve"))
    hub.repositories.clear()
    with pytest.raises(NotFound):
        open_source("org/chats")
    assert len(hub.asked_for("resolve")) == asked


def test_a_data_set_that_would_fill_the_disk_is_refused_before_it_is_fetched(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B12"""
    hub.add("org/chats", {"train.parquet": parquet(ROWS)})
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=1000))
    with pytest.raises(Unavailable, match=r"the download needs .*, 0\.0 MB are free"):
        open_source("org/chats")
    assert not [request for request in hub.asked_for("resolve") if request[0] == "GET"]
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=10**9))
    open_source("org/chats")
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=1000))
    open_source("org/chats")  # it is here: nothing has to be fetched


def test_a_data_set_in_the_cache_is_used_while_the_hub_is_away(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/chats", {"train.jsonl": lines(ROWS).encode()})
    digest = open_source("org/chats").digest
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert open_source("org/chats").digest == digest
    with pytest.raises(Unavailable):
        open_source("org/others")


def test_a_data_set_without_files_of_rows_says_what_it_has(hub: StandInHub) -> None:
    hub.add("org/script", {"script.py": b"print()", "data.zip": b"PK"})
    with pytest.raises(DataError, match="not clear which files") as caught:
        open_source("org/script")
    assert "files: none" in str(caught.value.hint)


def test_what_is_neither_here_nor_a_hub_id_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        open_source(str(tmp_path / "none.jsonl"))
