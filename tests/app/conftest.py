"""Real stores: SQLite in a file, PostgreSQL 15 from its own binaries on a Unix socket."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

import migrations
from app.services import broker
from app.settings import settings
from app.store import engine
from app.store.models import Base

_BINARIES = Path("/usr/lib/postgresql/15/bin")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty SPECLAB_HOME, and settings that know no other."""
    for name in [name for name in os.environ if name.startswith("SPECLAB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SPECLAB_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    settings.cache_clear()
    yield tmp_path / "home"
    engine.dispose()
    settings.cache_clear()


@pytest.fixture
def rings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A bell that only remembers: the ids of runs that workers were woken for."""
    heard: list[str] = []

    def wake(run_id: str) -> bool:
        heard.append(run_id)
        return True

    monkeypatch.setattr(broker, "wake", wake)
    return heard


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("template") / "speclab.db"
    migrations.upgrade(f"sqlite:///{file}")
    return file


@pytest.fixture
def sqlite_store(home: Path, rings: list[str], sqlite_template: Path) -> str:
    """The URL of a migrated, empty SQLite store; the settings point to it."""
    shutil.copy(sqlite_template, home / "speclab.db")
    return settings().store_url


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[str]:
    """The URL of a PostgreSQL server's `test` database, empty; it ends with the session."""
    if not (_BINARIES / "initdb").exists():
        reason = f"no PostgreSQL 15 in {_BINARIES}: apt-get install -y postgresql"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="speclab-pg-", dir="/tmp"))  # socket paths are short
    if os.geteuid() == 0:
        shutil.chown(folder, "postgres", "postgres")
    data = folder / "data"
    _postgres("initdb", "-D", str(data), "-A", "trust", "-U", "postgres", "-E", "UTF8", "-N")
    options = f"-c listen_addresses='' -c unix_socket_directories='{folder}' -c fsync=off"
    _postgres("pg_ctl", "-D", str(data), "-o", options, "-l", str(folder / "log"), "-w", "start")
    try:
        _postgres("createdb", "-h", str(folder), "-U", "postgres", "test")
        yield f"postgresql+psycopg://postgres@/test?host={folder}"
    finally:
        _postgres("pg_ctl", "-D", str(data), "-m", "immediate", "-w", "stop")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgresql_migrated(postgresql_server: str) -> str:
    migrations.upgrade(postgresql_server)
    return postgresql_server


@pytest.fixture
def postgresql_store(
    home: Path, rings: list[str], postgresql_migrated: str, monkeypatch: pytest.MonkeyPatch
) -> str:
    """The URL of a migrated, empty PostgreSQL store; the settings point to it."""
    monkeypatch.setenv("SPECLAB_DATABASE_URL", postgresql_migrated)
    settings.cache_clear()
    _empty(postgresql_migrated)
    return postgresql_migrated


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgresql)])
def store(request: pytest.FixtureRequest) -> str:
    """The URL of a migrated, empty store, on each dialect in turn."""
    return request.getfixturevalue(f"{request.param}_store")


def _empty(url: str) -> None:
    tables = ", ".join(table.name for table in Base.metadata.sorted_tables)
    server = create_engine(url)
    with server.begin() as connection:
        connection.execute(text(f"TRUNCATE {tables} RESTART IDENTITY"))
    server.dispose()


def _postgres(program: str, *arguments: str) -> None:
    """Run a program of PostgreSQL, which refuses to be root, as the user postgres."""
    become = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    command = [*become, str(_BINARIES / program), *arguments]
    done = subprocess.run(command, cwd="/", text=True, capture_output=True, timeout=60)
    if done.returncode != 0:
        raise RuntimeError(f"{program} failed: {done.stderr or done.stdout}")
