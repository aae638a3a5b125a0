"""Health: each part told apart, and nothing made by looking."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from app.services import broker, claims, health, runs
from app.store.engine import writing
from app.store.models import Slot, now


class _Answers:
    def ping(self) -> bool:
        return True


@pytest.fixture
def with_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "client", _Answers)


def test_a_lab_with_a_living_worker_has_no_complaint(sqlite_store: str, with_broker: None) -> None:
    claims.register_slots("here", (), 1, 1)
    runs.submit("verifier", {"name": "one"}, owner="me")
    runs.submit("verifier", {"name": "two"}, owner="me")
    claims.claim("here")
    found = health.check()
    assert found.ok and found.working and found.complaint == ""
    assert (found.queued, found.running) == (1, 1)
    (worker,) = found.workers
    assert (worker.host, worker.alive, worker.slots, worker.taken) == ("here", True, 2, 1)


def test_a_silent_worker_is_not_alive(sqlite_store: str, with_broker: None) -> None:
    claims.register_slots("here", (), 1, 1)
    with writing() as session:
        for slot in session.query(Slot):
            slot.host_seen_at = now() - timedelta(minutes=5)
    found = health.check()
    assert found.ok and not found.working
    assert found.complaint.startswith("No worker is alive")


def test_a_broker_that_is_away_is_said_so(sqlite_store: str) -> None:
    found = health.check()
    assert found.store.ok and not found.broker.ok and not found.ok
    assert found.broker.message in found.complaint


def test_a_store_that_is_not_there_is_not_made_by_looking(home: Path, with_broker: None) -> None:
    found = health.check()
    assert not found.store.ok and found.broker.ok
    assert found.complaint.startswith("The store does not answer")
    assert list(home.iterdir()) == []


def test_a_store_that_is_not_migrated_is_said_so(home: Path, with_broker: None) -> None:
    (home / "speclab.db").touch()
    assert "no such table" in health.check().store.message
