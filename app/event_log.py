"""The logging of every long-lived process: one line an event on stderr, fields as `name=value`.

Give fields with `logger.info("run submitted", extra={"run": run_id})`.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


class OneLine(logging.Formatter):
    """`2026-01-31T12:00:00.000Z INFO app.api run submitted run=abc`."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = [
            f"{name}={_quoted(value)}"
            for name, value in vars(record).items()
            if name not in _STANDARD
        ]
        message = " ".join(record.getMessage().splitlines())
        line = " ".join(
            [at.replace("+00:00", "Z"), record.levelname, record.name, message, *fields]
        )
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line


def configure(level: int = logging.INFO) -> None:
    """Send every logger of this process to stderr through `OneLine`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in ("uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _quoted(value: object) -> str:
    text = str(value)
    return repr(text) if not text or any(c.isspace() for c in text) else text
