"""Who uses a cache directory: a file in it that every reader holds locked.

The lock goes when its process does, however that ends, so nothing has to be cleaned up after a
crash. The file's time is when the cache was last taken into use; its text says what the cache is.
Light: no torch.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

MARK = "in-use"


def occupy(directory: Path, facts: Mapping[str, str]) -> IO[bytes]:
    """Make the directory if need be, and hold it against `remove` for as long as the lock that
    comes back is open. A directory that somebody removes meanwhile is made anew."""
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        mark = directory / MARK
        try:
            lock = _opened(mark, os.O_CREAT)
        except FileNotFoundError:  # removed since it was made
            continue
        fcntl.flock(lock, fcntl.LOCK_SH)
        if _is(lock, mark):
            if not os.fstat(lock.fileno()).st_size:
                _write(lock, facts)
            os.utime(mark)
            return lock
        lock.close()


def tell(directory: Path, facts: Mapping[str, str]) -> None:
    """Replace what is told of a directory, by whoever holds it."""
    with _opened(directory / MARK) as mark:
        _write(mark, facts)


def occupied(directory: Path) -> bool:
    """Whether a living process of this machine holds it."""
    if not (directory / MARK).exists():
        return False
    with _alone(directory) as alone:
        return not alone


def remove(directory: Path) -> bool:
    """Delete the directory; False, and nothing is touched, where it is occupied or bears no mark.

    It is renamed first, so that whoever takes it into use meanwhile gets a new one, and never
    sees files that are about to vanish.
    """
    aside = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.old")
    with _alone(directory) as alone:
        if alone:
            directory.rename(aside)
    if alone:
        shutil.rmtree(aside, ignore_errors=True)
    return alone


def last_used(directory: Path) -> float:
    """Unix time of the last taking into use; of a directory without a mark, of its last change."""
    mark = directory / MARK
    return (mark if mark.exists() else directory).stat().st_mtime


def facts_of(directory: Path) -> dict[str, str]:
    """What `occupy` was told of it; empty where nothing is known."""
    try:
        found = json.loads((directory / MARK).read_text())
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


@contextmanager
def _alone(directory: Path) -> Iterator[bool]:
    """Whether nobody else holds the directory; then nobody can take it meanwhile."""
    try:
        lock = _opened(directory / MARK)
    except FileNotFoundError:
        yield False
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield _is(lock, directory / MARK)


def _opened(mark: Path, flags: int = 0) -> IO[bytes]:
    return os.fdopen(os.open(mark, os.O_RDWR | flags, 0o666), "r+b", buffering=0)


def _write(mark: IO[bytes], facts: Mapping[str, str]) -> None:
    """Never empty in between: an empty mark is one that nobody has told anything yet."""
    text = json.dumps(dict(facts)).encode()
    os.pwrite(mark.fileno(), text, 0)
    os.ftruncate(mark.fileno(), len(text))


def _is(lock: IO[bytes], mark: Path) -> bool:
    try:
        return os.fstat(lock.fileno()).st_ino == mark.stat().st_ino
    except FileNotFoundError:
        return False
