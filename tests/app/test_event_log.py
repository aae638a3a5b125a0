"""One line an event, with its fields."""

from __future__ import annotations

import logging

from app.event_log import OneLine


def test_an_event_is_one_line_with_its_fields() -> None:
    record = logging.LogRecord("app.x", logging.INFO, "f", 1, "a %s\nb", ("run",), None)
    record.run, record.reason = "abc", "two words"
    line = OneLine().format(record)
    at, rest = line.split(" ", 1)
    assert at.endswith("Z") and "\n" not in line
    assert rest == "INFO app.x a run b run=abc reason='two words'"
