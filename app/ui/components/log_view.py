"""A run's log: the tail first, then what was added, followed live and downloadable whole."""

from __future__ import annotations

from typing import Any

from app.services.views import LogChunk
from app.ui.components.live import Live


class LogView(Live):
    """Its `input` event asks for the tail again, after updates that the browser missed."""

    SCRIPT = "log_view.js"
    ROOT = "sl-log"


def log_payload(run_id: str, chunk: LogChunk, *, reset: bool) -> dict[str, Any]:
    """One chunk of `run_id`'s log; `reset` replaces what is shown."""
    return {
        "run": run_id,
        "reset": reset,
        "start": chunk.start,
        "end": chunk.end,
        "size": chunk.size,
        "text": chunk.text,
        "href": f"/runs/{run_id}/log",
    }
