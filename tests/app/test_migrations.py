"""The schema's revisions on both dialects, and stores from before."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect, text

import migrations
from app.services import runs
from app.settings import settings
from app.store.models import Base, RunState
from speculators_core.errors import Conflict, Unavailable

OLD_STORE = Path(__file__).parent / "data" / "store_0001.sql"


def tables(url: str) -> set[str]:
    server = create_engine(url)
    try:
        return set(inspect(server).get_table_names()) - {"alembic_version"}
    finally:
        server.dispose()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgresql)])
def empty_store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'new' / 'speclab.db'}"
    url = request.getfixturevalue("postgresql_server")
    server = create_engine(url, isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.execute(text("DROP DATABASE IF EXISTS fresh"))
        connection.execute(text("CREATE DATABASE fresh"))
    server.dispose()
    return url.replace("/test?", "/fresh?")


@pytest.fixture
def old_store(home: Path) -> Path:
    """The file of a store as revision 0001 wrote it, with one run in it."""
    file = home / "speclab.db"
    with sqlite3.connect(file) as old:
        old.executescript(OLD_STORE.read_text(encoding="utf-8"))
    return file


def test_an_empty_store_is_migrated_to_what_the_models_say_and_back(empty_store):
    assert migrations.pending(empty_store)
    migrations.upgrade(empty_store)
    assert tables(empty_store) == set(Base.metadata.tables)
    assert not migrations.pending(empty_store)
    migrations.check(empty_store)
    migrations.downgrade(empty_store, "base")
    assert tables(empty_store) == set()
    migrations.upgrade(empty_store)
    assert tables(empty_store) == set(Base.metadata.tables)


def test_check_constraints_refuse_a_state_that_does_not_exist(empty_store):
    migrations.upgrade(empty_store)
    server = create_engine(empty_store)
    insert = text(
        "INSERT INTO gpu_leases (id, host, kind, device, host_seen_at)"
        " VALUES ('h/tpu:0', 'h', 'tpu', 0, '2026-01-01')"
    )
    with pytest.raises(Exception, match="ck_gpu_leases_kind"), server.begin() as connection:
        connection.execute(insert)
    server.dispose()


def test_a_store_of_a_newer_speclab_is_refused_in_words(empty_store):
    migrations.upgrade(empty_store)
    server = create_engine(empty_store)
    with server.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    server.dispose()
    with pytest.raises(Conflict, match="9999"):
        migrations.upgrade(empty_store)


def test_a_store_written_by_an_earlier_version_opens_after_its_upgrade(old_store: Path):
    assert migrations.pending(settings().store_url)
    migrations.upgrade(settings().store_url)
    migrations.check(settings().store_url)
    run = runs.get("0old0run00")
    assert run.state is RunState.SUCCEEDED
    assert run.result == {"output": "/models/old", "name": "old"}
    assert [metric.values for metric in runs.metrics("0old0run00")] == [{"loss": 1.5}]


def test_before_a_store_changes_its_file_is_copied(old_store: Path):
    migrations.upgrade(settings().store_url)
    with sqlite3.connect(old_store.with_name("speclab.db.before-0001")) as kept:
        assert kept.execute("SELECT version_num FROM alembic_version").fetchone() == ("0001",)
        assert kept.execute("SELECT count(*) FROM runs").fetchone() == (1,)


def test_one_step_back_and_forward_again_keeps_the_rows(old_store: Path):
    migrations.upgrade(settings().store_url)
    migrations.downgrade(settings().store_url, "-1")
    migrations.upgrade(settings().store_url)
    assert runs.list_runs().total == 1


def test_what_a_conversion_took_by_default_does_not_become_a_persons_word(old_store: Path):
    migrations.upgrade(settings().store_url)
    migrations.downgrade(settings().store_url, "0006")
    pair = {"checkpoint": "c", "verifier": "v"}
    silent = {**pair, "aux_layers": None, "aux_convention": "after", "speculative_tokens": 3}
    with sqlite3.connect(old_store) as old:
        old.execute("UPDATE runs SET kind = 'convert', params = ?", [json.dumps(silent)])
    migrations.upgrade(settings().store_url)
    assert runs.get("0old0run00").params == {**pair, "aux_layers": None}
    migrations.downgrade(settings().store_url, "0006")
    chosen = {**pair, "aux_layers": [1], "aux_convention": "output", "speculative_tokens": 5}
    with sqlite3.connect(old_store) as old:
        old.execute("UPDATE runs SET params = ?", [json.dumps(chosen)])
    migrations.upgrade(settings().store_url)
    assert runs.get("0old0run00").params == chosen


def test_a_store_that_was_never_migrated_says_what_to_do(home: Path):
    with pytest.raises(Unavailable, match="no such table") as caught:
        runs.list_runs()
    assert "speclab db upgrade" in str(caught.value)


def test_a_database_that_is_away_is_unavailable_without_its_password(home: Path, monkeypatch):
    monkeypatch.setenv(
        "SPECLAB_DATABASE_URL", "postgresql+psycopg://me:secret@/x?host=/nowhere/at/all"
    )
    settings.cache_clear()
    for attempt in (runs.list_runs, lambda: migrations.upgrade(settings().store_url)):
        with pytest.raises(Unavailable) as caught:
            attempt()
        assert "secret" not in str(caught.value)
