"""A run's `log.txt`: what its job process prints, line by line, without secrets, up to a size.

A log that has reached its size keeps swallowing lines, so that the job never blocks on a full
pipe; the last lines, which tell how it ended, are written when the log is closed.
"""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from app.settings import settings

LOG_LIMIT = 64 * 2**20  # bytes a run may write
_TAIL_LINES = 400
_LINE_LIMIT = 16 * 2**10  # bytes; longer lines are broken
_SECRET_NAMES = re.compile(r"(TOKEN|PASSWORD|SECRET|API_KEY)$")
_SECRETS = re.compile(
    r"hf_[A-Za-z0-9]{20,}"
    r"|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"
    r"|(?<=[Bb]earer )[A-Za-z0-9._~+/=-]{8,}"
)


def redactor(environment: Mapping[str, str]) -> Callable[[str], str]:
    """A function that blanks tokens, passwords in URLs and the environment's secret values."""
    values = sorted(
        (v for name, v in environment.items() if _SECRET_NAMES.search(name) and len(v) >= 8),
        key=len,
        reverse=True,
    )
    known = re.compile("|".join(map(re.escape, values))) if values else None

    def redact(line: str) -> str:
        line = _SECRETS.sub("***", line)
        return known.sub("***", line) if known else line

    return redact


class RunLog:
    """Appends to one log file; safe to use from several threads."""

    def __init__(self, path: Path, limit: int = LOG_LIMIT) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._limit = limit
        self._size = self._file.tell()
        self._left_out: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self._left_out_count = 0
        self._redact = redactor(os.environ)
        self._lock = threading.Lock()
        self.last_lines: deque[str] = deque(maxlen=_TAIL_LINES)

    def write(self, line: str) -> None:
        """One line, without its end. Of a progress bar's redrawn line the last state is kept."""
        text = self._redact(line.rstrip("\r\n").rpartition("\r")[2])
        with self._lock:
            self.last_lines.append(text)
            self._append(text.encode(errors="replace") + b"\n")

    def note(self, text: str) -> None:
        """A line of the supervisor's own."""
        self.write(f"[speclab {datetime.now(UTC):%Y-%m-%d %H:%M:%S}] {text}")

    def pump(self, lines: Iterable[bytes]) -> None:
        """Copy lines until their source ends."""
        for line in lines:
            self.write(line.decode(errors="replace"))

    def close(self) -> None:
        with self._lock:
            if self._left_out:
                hidden = self._left_out_count - len(self._left_out)
                self._file.write(
                    f"[speclab] log limit of {self._limit} bytes reached: {hidden} lines are left "
                    f"out here; the last {len(self._left_out)} follow\n".encode()
                )
                self._file.write(b"".join(self._left_out))
                self._left_out.clear()
            self._file.close()

    def _append(self, line: bytes) -> None:
        if self._size + len(line) > self._limit:
            self._left_out.append(line)
            self._left_out_count += 1
            return
        self._size += len(line)
        with suppress(OSError):  # a full disk must not block the job on its pipe
            self._file.write(line)


def note(run_id: str, text: str) -> None:
    """Add one line to a run's log from outside of its supervision."""
    log = RunLog(settings().run_dir(run_id) / "log.txt")
    log.note(text)
    log.close()


def lines_of(stream: IO[bytes]) -> Iterable[bytes]:
    """Lines of a pipe; one without an end is broken at a fixed length."""
    return iter(lambda: stream.readline(_LINE_LIMIT), b"")


def last_meaningful_line(lines: Iterable[str]) -> str | None:
    """The line that most likely says why: the last error line, else the last line with words."""
    words = [line.strip() for line in lines if re.search(r"\w", line) and "[speclab " not in line]
    errors = [line for line in words if re.search(r"\b\w*(Error|Exception)\b|\berror:", line)]
    return next(reversed(errors or words), None)
