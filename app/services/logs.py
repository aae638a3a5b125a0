"""A run's log file by byte offset: never more than was asked for, whatever its size."""

from __future__ import annotations

from pathlib import Path

from app.services.views import LogChunk
from app.settings import settings
from speculators_core.errors import NotFound

MOST_BYTES = 1 << 20


def log_path(run_id: str) -> Path:
    """Where the log of a run lies; the file appears when the run first starts."""
    if not run_id.isalnum():
        raise NotFound(f"there is no run {run_id!r}")
    return settings().run_dir(run_id) / "log.txt"


def log(run_id: str, offset: int | None = None, limit: int = 65_536) -> LogChunk:
    """At most `limit` bytes from `offset` on, or the last ones for None.

    Chunks join without loss: a character that the limit would split is left to the next chunk.
    A tail starts at a line. `limit` is at least 16 and at most 1 MiB. An absent log is empty.
    """
    limit = max(16, min(limit, MOST_BYTES))
    try:
        with log_path(run_id).open("rb") as file:
            size = file.seek(0, 2)
            tail = offset is None
            start = max(0, size - limit) if offset is None else min(max(0, offset), size)
            file.seek(start)
            data = file.read(limit)
    except FileNotFoundError:
        return LogChunk(text="", start=0, end=0, size=0)
    if tail and start > 0:
        cut = _after_first_newline(data)
        start, data = start + cut, data[cut:]
    data = _whole_characters(data) or data
    return LogChunk(
        text=data.decode("utf-8", errors="replace"), start=start, end=start + len(data), size=size
    )


def _after_first_newline(data: bytes) -> int:
    """Where the first whole line starts; in a single giant line, the first whole character."""
    newline = data.find(b"\n")
    if newline >= 0 and newline + 1 < len(data):
        return newline + 1
    return next((i for i, byte in enumerate(data[:4]) if byte & 0xC0 != 0x80), 0)


def _whole_characters(data: bytes) -> bytes:
    """Without the bytes of a UTF-8 character that has only begun at the end."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        needs = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return data[:-back] if needs > back else data
    return data
