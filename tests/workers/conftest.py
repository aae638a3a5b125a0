"""A lab of its own for each test, with quick heartbeats."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from app.settings import settings
from app.store import engine
from app.store.models import Base
from tests.workers.lab import Lab

_QUICK = {
    "SPECLAB_HEARTBEAT_SECONDS": "0.3",
    "SPECLAB_LOST_AFTER_SECONDS": "6",
    "SPECLAB_STOP_GRACE_SECONDS": "2",
    "SPECLAB_WORKER_HOST": "here",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture
def home(monkeypatch):
    """A fresh SPECLAB_HOME with a migrated store, short enough for a Unix socket."""
    path = Path(tempfile.mkdtemp(prefix="sl-", dir="/tmp"))
    monkeypatch.setenv("SPECLAB_HOME", str(path))
    for name, value in _QUICK.items():
        monkeypatch.setenv(name, value)
    for name in ("SPECLAB_BROKER_URL", "SPECLAB_DATABASE_URL", "SPECLAB_GPUS"):
        monkeypatch.delenv(name, raising=False)
    settings.cache_clear()
    Base.metadata.create_all(engine.engine())
    yield path
    engine.dispose()
    settings.cache_clear()
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def lab(home):
    """The home with a running broker; workers are started by the test."""
    made = Lab(home)
    made.start_broker()
    yield made
    made.close()
