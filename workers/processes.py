"""Processes and their groups on Linux, told apart from strangers that reuse their numbers.

A group is known by its leader's pid *and* start time (clock ticks since boot, from
`/proc/PID/stat`). A pid whose start time differs belongs to somebody else and is never signalled.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.05
_KILL_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Stat:
    """What `/proc/PID/stat` says (man 5 proc)."""

    state: str
    pgid: int
    session: int
    started: float


def start_time(pid: int) -> float | None:
    """When the process started, in clock ticks since boot; None when it is gone or a zombie."""
    stat = _stat(pid)
    return stat.started if stat else None


def process_alive(pid: int, started: float) -> bool:
    """Whether that very process still runs."""
    return start_time(pid) == started


def group_alive(pgid: int, started: float) -> bool:
    """Whether anything of the group still runs, its leader or what the leader left behind."""
    return any(_members(pgid, started))


def living_groups() -> set[int]:
    """Numbers of all groups with a living member, from one look at `/proc`."""
    stats = (_stat(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return {stat.pgid for stat in stats if stat}


def signal_group(pgid: int, started: float, number: int) -> None:
    """Signal a group; nothing happens when it is gone or its number belongs to another now."""
    if group_alive(pgid, started):
        with suppress(ProcessLookupError):
            os.killpg(pgid, number)


def end_group(pgid: int, started: float, grace_s: float) -> bool:
    """TERM, wait `grace_s`, KILL, verify. True when nothing of the group is left."""
    signal_group(pgid, started, signal.SIGTERM)
    if _wait_gone(pgid, started, grace_s):
        return True
    signal_group(pgid, started, signal.SIGKILL)
    return _wait_gone(pgid, started, _KILL_WAIT_S)


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold blanks and brackets
    if fields[0] in "ZX":
        return None
    return _Stat(fields[0], int(fields[2]), int(fields[3]), float(fields[19]))


def _members(pgid: int, started: float) -> Iterator[int]:
    """Living members. The kernel gives a number to no new process while a group bears it, so
    members without a leader are what ours left behind: same session, same user, started later.
    """
    leader = _stat(pgid)
    if leader is not None and leader.started != started:
        return
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _belongs(int(entry.name), pgid, started):
            yield int(entry.name)


def _belongs(pid: int, pgid: int, started: float) -> bool:
    stat = _stat(pid)
    if stat is None or stat.pgid != pgid or stat.session != pgid or stat.started < started:
        return False
    try:
        return Path(f"/proc/{pid}").stat().st_uid == os.geteuid()
    except OSError:
        return False


def _wait_gone(pgid: int, started: float, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while group_alive(pgid, started):
        if time.monotonic() >= until:
            return False
        time.sleep(_POLL_S)
    return True
