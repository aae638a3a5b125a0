"""Why a server died, found in what it said. Its last line is hardly ever the cause."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PREFIX = re.compile(
    r"^\([\w:]+ (?:\w+=\w+ ?)*\)\s?"  # (EngineCore pid=12)
    r"|^(?:ERROR|CRITICAL|INFO|WARNING) \d\d-\d\d \d\d:\d\d:\d\d (?:\[[\w./-]+:\d+\] ?)?"
)
_EXCEPTION = re.compile(
    r"^(?:\w+\.)*(\w*(?:Error|Exception|Interrupt|Failure)|KeyboardInterrupt)\b(?::\s*(.*))?$"
)
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+), in (\w+)')
_FIELD = re.compile(r"^\s+(.*?)\s*\[type=\w+")  # pydantic puts the reason below its headline
_CONSEQUENCE = ("Engine core initialization failed", "EngineDeadError", "See root cause above")
_USAGE = re.compile(r"error: (.+)$")  # argparse
_LIMIT = 400  # characters


def first_cause(lines: Iterable[str]) -> str:
    """The first exception that is no mere consequence of another; in one short line."""
    plain = [bare(line) for line in lines]
    causes = (i for i, line in enumerate(plain) if _EXCEPTION.match(line) and not _follows(line))
    first = next(causes, None)
    if first is not None:
        return _told(plain, first)[:_LIMIT]
    for line in reversed(plain):
        usage = _USAGE.search(line)
        if usage:
            return usage.group(1)[:_LIMIT]
    words = [line.strip() for line in plain if re.search(r"\w", line)]
    return words[-1][:_LIMIT] if words else "it said nothing"


def bare(line: str) -> str:
    """A line without the prefixes of process and logger."""
    previous = None
    while previous != line:
        previous, line = line, _PREFIX.sub("", line)
    return line


def _follows(line: str) -> bool:
    return any(sign in line for sign in _CONSEQUENCE)


def _told(lines: list[str], at: int) -> str:
    match = _EXCEPTION.match(lines[at])
    assert match is not None
    name, message = match.group(1), match.group(2) or ""
    if "validation error" in message:
        reasons = (_FIELD.match(line) for line in lines[at + 1 : at + 6])
        return next((reason.group(1) for reason in reasons if reason), message)
    if message.strip():
        return f"{name}: {message.strip()}"
    frames = (_FRAME.match(line) for line in reversed(lines[max(0, at - 12) : at]))
    frame = next((found for found in frames if found), None)
    return f"{name} in {frame.group(1)}:{frame.group(2)}" if frame else name
