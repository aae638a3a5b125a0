"""The one running `speclab up` (or `speclab worker`) of a SPECLAB_HOME: found, held, stopped.

A lock file that the kernel frees with its holder keeps a second one from starting. `<role>.json`
says who the holder is: pid and start time, so that a stranger with a reused pid is never
signalled.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from speculators_core.errors import Conflict

Role = Literal["up", "worker"]
ROLES: tuple[Role, ...] = ("up", "worker")

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Instance:
    """A parent process that is alive. `address` is where its app listens, once it answers."""

    role: Role
    pid: int
    started: int
    address: str | None = None


def running(home: Path, role: Role) -> Instance | None:
    """The holder of a home, if it still lives."""
    try:
        found = Instance(**json.loads((home / f"{role}.json").read_text()))
    except (FileNotFoundError, json.JSONDecodeError, TypeError):
        return None
    return found if start_ticks(found.pid) == found.started else None


@contextmanager
def hold(home: Path, role: Role) -> Iterator[None]:
    """Be the one instance for the length of the block; `Conflict` where there is another."""
    with (home / f"{role}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(
                f"`speclab {role}` is running already, or just starting or stopping",
                where=str(home),
                hint="`speclab status` says which; `speclab down` stops it",
            ) from None
        publish(home, role, None)
        try:
            yield
        finally:
            (home / f"{role}.json").unlink(missing_ok=True)


def publish(home: Path, role: Role, address: str | None) -> None:
    """Write down who this process is, and where its app answers."""
    pid = os.getpid()
    mine = Instance(role, pid, start_ticks(pid) or 0, address)
    partial = home / f".{role}.json"
    partial.write_text(json.dumps(asdict(mine)))
    partial.rename(home / f"{role}.json")


def stop(found: Instance, grace_s: float) -> bool:
    """Ask an instance to stop everything and wait; False where it had to be killed."""
    descendants = _descendants(found.pid)
    with suppress(ProcessLookupError):
        os.kill(found.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while start_ticks(found.pid) == found.started:
        if time.monotonic() > deadline:
            kill_all([*_processes(found.pid), *descendants, *_descendants(found.pid)])
            return False
        time.sleep(_POLL_S)
    return True


def start_ticks(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None for one that is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if stat[0] in ("Z", "X") else int(stat[19])


def kill_all(processes: list[psutil.Process], wait_s: float = 5.0) -> None:
    """KILL processes; psutil looks at their start times, so no stranger is hit."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=wait_s)


def _descendants(pid: int) -> list[psutil.Process]:
    return [child for process in _processes(pid) for child in process.children(recursive=True)]


def _processes(pid: int) -> list[psutil.Process]:
    try:
        return [psutil.Process(pid)]
    except psutil.NoSuchProcess:
        return []
