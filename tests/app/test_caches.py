"""Caches: how large, when last used, by whom; and what is cleaned up."""

from __future__ import annotations

import json
import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from app import cli
from app.services import caches, data_sets, runs
from app.settings import settings
from app.ui import caches as page
from app.ui.components.elements import text_of
from speculators_core.data import occupancy
from speculators_core.errors import Conflict, InputError, NotFound
from tests.app.test_ui_conversion import nodes

FACTS = {"model": "tiny", "layers": "[2, 4, 5]", "dtype": "float32"}
DAY = 86400.0


def make(directory: Path, *, days: float = 0.0, size: int = 1000) -> Path:
    """A cache that was used so many days ago, and that no process holds."""
    occupancy.occupy(directory, FACTS).close()
    (directory / "0000000-0000009.safetensors").write_bytes(b"x" * size)
    then = datetime.now(UTC).timestamp() - days * DAY
    os.utime(directory / occupancy.MARK, (then, then))
    return directory


@pytest.fixture
def data(sqlite_store, tmp_path: Path) -> Path:
    """A registered prepared data set."""
    place = tmp_path / "prepared"
    place.mkdir()
    (place / "meta.json").write_text("{}")
    data_sets.register(place, "mine", "prepared", samples=3)
    return place


def test_size_last_use_and_what_it_is_are_told(data: Path) -> None:
    made = make(data.with_name("prepared.states-abc"), days=3)
    (one,) = caches.list_caches()
    assert one.path == str(made) and one.kind == "states"
    assert 1000 <= one.size < 1200
    assert timedelta(days=2.9) < datetime.now(UTC) - one.used_at < timedelta(days=3.1)
    assert one.about == "hidden states: tiny, after layers [2, 4, 5], float32; of prepared"
    assert not one.in_use and one.users == ()


def test_old_ones_go_and_young_ones_stay(data: Path) -> None:
    old = make(data.with_name("prepared.states-old"), days=40)
    young = make(data.with_name("prepared.states-young"), days=20)
    (removed,) = caches.clean(30)
    assert removed.path == str(old)
    assert not old.exists() and young.exists() and data.exists()
    with pytest.raises(InputError):
        caches.clean(-1)


def test_what_a_process_holds_is_never_removed(data: Path) -> None:
    held = make(data.with_name("prepared.states-held"), days=40)
    with occupancy.occupy(held, FACTS):
        os.utime(held / occupancy.MARK, (0, 0))
        assert caches.list_caches()[0].in_use
        assert caches.clean(0) == []
        with pytest.raises(Conflict, match="in use by a process"):
            caches.remove(held.name)
    assert len(caches.clean(0)) == 1


def test_what_a_stopped_preparation_left_grows_old_like_any_cache(data: Path) -> None:
    left = data.with_name(".other.0123456789abcdef.parts")
    with occupancy.occupy(left, {"output": "other"}):
        (left / "0000000.part").write_bytes(b"x" * 500)
        assert caches.list_caches()[0].in_use
    os.utime(left / occupancy.MARK, (0, 0))
    (one,) = caches.list_caches()
    assert (one.kind, one.in_use) == ("parts", False)
    assert one.about.startswith("what was done of other before its preparation was stopped")
    assert [gone.name for gone in caches.clean(30)] == [left.name]
    assert not left.exists()


@pytest.mark.parametrize("named", ["mine", "path"])
def test_what_a_run_that_has_not_ended_reads_is_never_removed(data: Path, named: str) -> None:
    made = make(data.with_name("prepared.states-abc"), days=40)
    reference = "mine" if named == "mine" else str(data)
    run = runs.submit("train", {"data": reference, "verifier": str(data)}, owner="ada")
    assert caches.list_caches()[0].users == (run.id,)
    assert caches.clean(0) == []
    with pytest.raises(Conflict, match=run.id):
        caches.remove(made.name)
    runs.cancel(run.id, "ada")
    assert len(caches.clean(0)) == 1 and not made.exists()


def test_one_can_be_removed_by_name(data: Path) -> None:
    made = make(data.with_name("prepared.states-abc"))
    caches.remove("prepared.states-abc")
    assert not made.exists()
    with pytest.raises(NotFound):
        caches.remove("prepared.states-abc")


def test_states_beside_data_that_nobody_registered_are_found_where_one_looks(
    sqlite_store, tmp_path: Path
) -> None:
    made = make(tmp_path / "elsewhere" / "p.states-abc")
    assert caches.list_caches() == []
    assert [c.path for c in caches.list_caches([made.parent])] == [str(made)]


def test_what_vllm_compiled_is_a_cache_too(sqlite_store) -> None:
    directory = settings().home / "cache" / "vllm"
    directory.mkdir(parents=True)
    (directory / "kernel").write_bytes(b"x" * 500)
    (one,) = caches.list_caches()
    assert (one.kind, one.size, one.in_use) == ("vllm", 500, False)
    caches.remove("vllm")
    assert not directory.exists()


def test_what_vllm_compiled_stays_while_a_process_outside_the_store_uses_it(sqlite_store) -> None:
    directory = settings().home / "cache" / "vllm"
    with occupancy.occupy(directory, {}):
        assert caches.list_caches()[0].in_use
        assert caches.clean(0) == []
        with pytest.raises(Conflict, match="in use by a process"):
            caches.remove("vllm")
    caches.remove("vllm")
    assert not directory.exists()


def test_caches_of_an_older_version_can_go(data: Path) -> None:
    """Without a mark, what counts is when the directory was written."""
    old = data.with_name("prepared.states-0123456789abcdef")
    old.mkdir()
    (old / "0-9.safetensors").write_bytes(b"x")
    os.utime(old, (0, 0))
    assert len(caches.clean(30)) == 1 and not old.exists()


def test_the_speed_at_which_states_were_computed_is_known_afterwards(data: Path) -> None:
    assert caches.states_speed("/models/tiny") is None
    for name, days, speed in (("a", 3, "250.0"), ("b", 1, "300.0")):
        made = make(data.with_name(f"prepared.states-{name}"))
        occupancy.tell(made, {**FACTS, "tokens_per_second": speed})
        then = datetime.now(UTC).timestamp() - days * DAY
        os.utime(made / occupancy.MARK, (then, then))
    found = caches.states_speed("/models/tiny")
    assert found is not None and found.tokens_per_second == 300.0
    assert caches.states_speed("/models/other") is None


def test_the_command_lists_and_cleans(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def speclab(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["caches", *arguments])
        return int(str(ended.value.code)), capsys.readouterr().out

    old = make(data.with_name("prepared.states-old"), days=40)
    status, said = speclab()
    assert status == 0 and "1.1 kB in all" in said and str(old) in said
    status, said = speclab("--json")
    assert [c["path"] for c in json.loads(said)["caches"]] == [str(old)]
    assert speclab("--older-than", "3")[0] == 2
    assert "nothing is old enough" in speclab("--clean", "--older-than", "50")[1]
    status, said = speclab("--clean", "--json")
    assert [c["path"] for c in json.loads(said)["removed"]] == [str(old)]
    assert not old.exists()


def test_the_page_offers_to_remove_only_what_nobody_uses(data: Path) -> None:
    free = make(data.with_name("prepared.states-free"), size=2000)
    held = make(data.with_name("prepared.states-held"))
    with occupancy.occupy(held, FACTS):
        tree = page.table(caches.list_caches())
    buttons = [n[1]["data-value"] for n in nodes(tree, "button") if "data-action" in n[1]]
    assert buttons == [str(free)]
    told = text_of(tree)
    assert "3.1 kB in all" in told and "a process of this machine" in told
    assert "removed: 2.1 kB are free again" in text_of(page._removed(str(free)))
    assert "Nothing is cached" in text_of(page.table([]))


def test_a_directory_that_only_has_such_a_name_is_nobodys_cache(sqlite_store, tmp_path: Path):
    foreign = tmp_path / "us.states-2024"
    foreign.mkdir()
    (foreign / "ohio.csv").write_text("1")
    os.utime(foreign, (0, 0))
    assert caches.clean(0, [tmp_path]) == []
    assert (foreign / "ohio.csv").exists()
    assert not occupancy.remove(foreign) and foreign.is_dir()


def test_whoever_takes_a_cache_into_use_while_it_is_removed_gets_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    directory = tmp_path / "p.states-1"
    occupancy.occupy(directory, FACTS).close()
    (directory / "old.safetensors").write_bytes(b"1")
    taken, real = [], shutil.rmtree

    def meanwhile(aside: Path, **_: object) -> None:
        taken.append(occupancy.occupy(directory, FACTS))
        real(aside)

    monkeypatch.setattr(occupancy.shutil, "rmtree", meanwhile)
    assert occupancy.remove(directory)
    assert occupancy.occupied(directory) and not (directory / "old.safetensors").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["p.states-1"]
