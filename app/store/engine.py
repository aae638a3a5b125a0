"""Connections to the store: one engine a URL and process, made when first needed.

`writing()` and `reading()` are the only doors. On SQLite a write transaction starts with BEGIN
IMMEDIATE, because a reader that becomes a writer is refused at once whatever the busy timeout
says; a lock by name (`serialise`) is then implied. On PostgreSQL it is an advisory lock.

Raises `Unavailable` when the database is away, locked too long or not migrated.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import InterfaceError, OperationalError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from app.settings import settings
from speculators_core.errors import Unavailable

logger = logging.getLogger(__name__)

_WRITES = "speclab_writes"
_BUSY_MS = 10_000
_NETWORK_FILE_SYSTEMS = frozenset(
    (
        *("nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs"),
        *("lustre", "beegfs", "gpfs", "fuse.sshfs", "fuse.glusterfs", "fuse.s3fs"),
        *("fuse.rclone", "virtiofs"),
    )
)

_engines: dict[str, Engine] = {}
_guard = threading.Lock()


def engine(url: str | None = None) -> Engine:
    """The engine of a URL (default: the settings' store) in this process."""
    url = url or settings().store_url
    with _guard:
        if url not in _engines:
            _engines[url] = _create(url)
        return _engines[url]


def dispose() -> None:
    """Close all connections of this process."""
    with _guard:
        for known in _engines.values():
            known.dispose()
        _engines.clear()


def _forget_after_fork() -> None:
    """A child may not use its parent's connections, and must not close them either."""
    global _guard
    _guard = threading.Lock()
    for known in _engines.values():
        known.dispose(close=False)
    _engines.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


@contextmanager
def writing() -> Iterator[Session]:
    """A session in one write transaction: committed at the end, rolled back on any error."""
    writer = engine().execution_options(**{_WRITES: True})
    with _speaking(), Session(writer, expire_on_commit=False) as session, session.begin():
        yield session


@contextmanager
def reading() -> Iterator[Session]:
    """A session in one read transaction, a consistent snapshot on SQLite; never commits."""
    with _speaking(), Session(engine(), expire_on_commit=False, autoflush=False) as session:
        yield session


def serialise(session: Session, name: str) -> None:
    """Within this write transaction, be the only one in the lab that holds the lock `name`."""
    if session.get_bind().dialect.name == "postgresql":
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], signed=True)
        session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": key})


def network_file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """The type of the network file system that `path` lies on; None on a local disk."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    place = path.resolve()
    best, kind = -1, ""
    for fields in (line.split() for line in lines):
        mount = Path(fields[1].replace("\\040", " "))
        if place.is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), fields[2]
    return kind if kind in _NETWORK_FILE_SYSTEMS else None


def to_json(value: Any) -> str:
    """JSON that both dialects take: a number that is not finite becomes null."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


@contextmanager
def _speaking() -> Iterator[None]:
    """Turn the driver's complaints into one error that a person can act on."""
    try:
        yield
    except (OperationalError, InterfaceError, PoolTimeout) as error:
        raise _unavailable(error) from error
    except ProgrammingError as error:
        if "does not exist" not in str(error):
            raise
        raise _unavailable(error) from error


def _unavailable(error: Exception) -> Unavailable:
    said = str(getattr(error, "orig", None) or error).splitlines()[0]
    missing = "no such table" in said or "no such column" in said or "does not exist" in said
    return Unavailable(
        f"the store can't be used: {said}",
        where=make_url(settings().store_url).render_as_string(hide_password=True),
        hint="run `speclab db upgrade`" if missing else "is the database up? `speclab doctor`",
    )


def _create(url: str) -> Engine:
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        return _sqlite(url, Path(parsed.database or ":memory:"))
    return create_engine(
        url,
        pool_pre_ping=True,
        pool_size=5,
        max_overflow=35,
        pool_timeout=5,
        json_serializer=to_json,
        connect_args={"connect_timeout": 5, "tcp_user_timeout": 15_000},
    )


def _sqlite(url: str, file: Path) -> Engine:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    network = network_file_system(file)
    if network:
        logger.warning(
            "the store %s lies on a network file system (%s): SQLite can be damaged there; "
            "WAL is off. Move SPECLAB_HOME to a local disk or use PostgreSQL",
            file,
            network,
        )
    made = create_engine(url, pool_size=5, max_overflow=35, pool_timeout=5, json_serializer=to_json)
    journal = "DELETE" if network else "WAL"

    @event.listens_for(made, "connect")
    def _prepare(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves
        for pragma in (
            f"busy_timeout={_BUSY_MS}",
            f"journal_mode={journal}",
            "synchronous=NORMAL",
            "foreign_keys=ON",
        ):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(made, "begin")
    def _begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get(_WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return made
