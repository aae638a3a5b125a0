"""Connections under contention, on both dialects; compare-and-set; network file systems."""

from __future__ import annotations

import logging
import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from sqlalchemy import create_engine, select, text

from app.services import runs
from app.store import engine
from app.store.engine import network_file_system, reading, writing
from app.store.models import Run, RunState
from app.store.transitions import move
from speculators_core.errors import Unavailable

PREPARE = {"data": ["chats.jsonl"], "verifier": "v"}
FORK = multiprocessing.get_context("fork")


def submit(**changes) -> str:
    return runs.submit("prepare", {**PREPARE, **changes}, owner="ada").id


def count_up(run_id: str, times: int) -> None:
    """Read, then write what was read plus one: a lost update shows."""
    for _ in range(times):
        with writing() as session:
            run = session.get(Run, run_id, with_for_update=True)
            run.priority += 1


def count_up_in_child(run_id: str, times: int, faults) -> None:
    try:
        count_up(run_id, times)
    except BaseException as fault:
        faults.put(repr(fault))
        raise


def test_writers_and_pollers_together_meet_no_lock_error_and_lose_no_update(store):
    ids = [submit(seed=n) for n in range(4)]
    stop = threading.Event()

    def poll() -> int:
        polls = 0
        while not stop.wait(0.1) or polls == 0:
            assert runs.list_runs().total == 4
            polls += 1
        return polls

    with ThreadPoolExecutor(14) as pool:
        pollers = [pool.submit(poll) for _ in range(10)]
        writers = [pool.submit(count_up, ids[n], 200) for n in range(4)]
        for writer in writers:
            writer.result(timeout=60)
        stop.set()
        assert all(poller.result(timeout=60) > 0 for poller in pollers)
    assert [runs.get(run_id).priority for run_id in ids] == [200] * 4


def test_forked_processes_that_read_then_write_lose_no_update(store):
    run_id = submit()  # the parent has an open connection, which its children must not use
    faults = FORK.Queue()
    children = [FORK.Process(target=count_up_in_child, args=(run_id, 50, faults)) for _ in range(2)]
    for child in children:
        child.start()
    count_up(run_id, 50)
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0], faults.get()
    assert runs.get(run_id).priority == 150


def test_sqlite_writers_begin_immediate_and_readers_do_not(sqlite_store):
    run_id = submit()
    with writing() as first:
        first.get(Run, run_id).priority = 7
        assert runs.get(run_id).priority == 0  # a reader sees the state before, without waiting
        other = create_engine(sqlite_store, connect_args={"timeout": 0.05})
        with pytest.raises(Exception, match="locked"), other.begin() as connection:
            connection.execute(text("UPDATE runs SET priority = 1"))
        other.dispose()
    assert runs.get(run_id).priority == 7


def test_sqlite_has_wal_foreign_keys_and_a_busy_timeout(sqlite_store):
    with reading() as session:
        pragmas = {
            name: session.scalar(text(f"PRAGMA {name}"))
            for name in ("journal_mode", "foreign_keys", "busy_timeout", "synchronous")
        }
    assert pragmas == {
        "journal_mode": "wal",
        "foreign_keys": 1,
        "busy_timeout": 10_000,
        "synchronous": 1,
    }


def test_a_block_that_fails_leaves_nothing_written(store):
    run_id = submit()
    with pytest.raises(ZeroDivisionError), writing() as session:
        session.get(Run, run_id).priority = 9
        session.flush()
        _ = 1 / 0
    assert runs.get(run_id).priority == 0


def test_a_late_write_is_refused_and_logged(store, caplog):
    run_id = submit()
    runs.cancel(run_id, "ada")
    with caplog.at_level(logging.WARNING), writing() as session:
        assert not move(session, run_id, (RunState.QUEUED,), RunState.RUNNING)
    assert runs.get(run_id).state is RunState.CANCELLED
    assert run_id in caplog.text and "cancelled" in caplog.text


def test_times_come_back_as_utc_whatever_zone_they_went_in_with(store):
    run_id = submit()
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=5)))
    with writing() as session:
        session.get(Run, run_id).started_at = moment
    found = runs.get(run_id).started_at
    assert found == moment and found.tzinfo == UTC


def test_numbers_that_are_not_finite_are_kept_as_null(store):
    run_id = submit()
    with writing() as session:
        session.get(Run, run_id).result = {"loss": float("nan"), "deep": [{"x": float("inf")}]}
    assert runs.get(run_id).result == {"loss": None, "deep": [{"x": None}]}


def test_a_store_that_stays_locked_is_unavailable(sqlite_store, monkeypatch):
    monkeypatch.setattr(engine, "_BUSY_MS", 50)
    engine.dispose()
    other = create_engine(sqlite_store)
    with other.connect() as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        with pytest.raises(Unavailable, match="locked"):
            submit()
        connection.exec_driver_sql("ROLLBACK")
    other.dispose()
    submit()


@pytest.mark.parametrize(
    ("mounted", "expected"),
    [("nfs4", "nfs4"), ("cifs", "cifs"), ("fuse.sshfs", "fuse.sshfs"), ("ext4", None)],
)
def test_the_deepest_mount_says_whether_a_path_is_on_a_network(tmp_path, mounted, expected):
    place = tmp_path.resolve()
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda1 / ext4 rw 0 0\nserver:/lab {place} {mounted} rw 0 0\n")
    assert network_file_system(place / "home" / "speclab.db", mounts) == expected
    assert network_file_system(Path("/"), mounts) is None


def test_sqlite_on_a_network_file_system_warns_and_does_without_wal(
    sqlite_store, monkeypatch, caplog
):
    monkeypatch.setattr(engine, "network_file_system", lambda file: "nfs4")
    engine.dispose()
    with caplog.at_level(logging.WARNING):
        run_id = submit()
    assert "nfs4" in caplog.text
    with reading() as session:
        assert session.scalar(text("PRAGMA journal_mode")) == "delete"
        assert session.scalar(select(Run.id)) == run_id
