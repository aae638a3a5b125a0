"""The engine's end of the trace: events leave as JSON lines through a Unix stream socket.

A write never blocks the engine. What the socket does not take at once waits in a bounded buffer;
what the buffer does not take is dropped and counted, a request's count being told in its `end`
event. Nobody listening, or a listener that went away, costs a refused connection twice a second.
Standard library only: this module is imported inside vLLM's scheduler.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

SOCKET_VARIABLE = "SPECLAB_TRACE_SOCKET"
_RETRY_S = 0.5  # between attempts to reach a listener that is not there
_ENDS_RESERVE = 65536  # bytes beyond the limit that only `start` and `end` events may use


class TraceWriter:
    """Writes trace events to the socket at `path`. For one thread.

    `dropped` counts all events that were lost since the writer was made.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_pending_bytes: int = 1 << 20) -> None:
        self.path = os.fspath(path)
        self.max_pending_bytes = max_pending_bytes
        self.dropped = 0
        self._dropped_of: dict[str, int] = {}  # requests that have not ended
        self._pending: deque[tuple[str, bytes]] = deque()  # (rid, line)
        self._pending_bytes = 0
        self._sent = 0  # bytes of the first pending line that the socket has taken
        self._socket: socket.socket | None = None
        self._retry_at = 0.0

    @classmethod
    def from_environment(cls) -> TraceWriter | None:
        """The writer that `SPECLAB_TRACE_SOCKET` asks for; None where it is unset."""
        path = os.environ.get(SOCKET_VARIABLE)
        return cls(path) if path else None

    def write(self, event: Mapping[str, Any]) -> None:
        """Send an event (`ev`, `rid`, …) or keep it for the next write; never waits.

        An `end` event gets `dropped`, the number of this request's events that were lost.
        """
        rid, kind = str(event.get("rid", "")), event.get("ev")
        if kind == "end":
            event = {**event, "dropped": self._dropped_of.pop(rid, 0)}
        line = json.dumps(event, separators=(",", ":")).encode() + b"\n"
        limit = self.max_pending_bytes + (0 if kind == "step" else _ENDS_RESERVE)
        if self._pending_bytes + len(line) > limit:
            self._count_drop(rid, ended=kind == "end")
        else:
            self._pending.append((rid, line))
            self._pending_bytes += len(line)
        self.flush()

    def flush(self) -> bool:
        """Send what the socket takes now. True when nothing is left pending."""
        try:
            while self._pending and self._connected() is not None:
                self._send_first()
        except BlockingIOError:
            pass  # the listener is slow: later
        except OSError:
            self._disconnect()
        return not self._pending

    def close(self, wait_s: float = 0.0) -> None:
        """Send what is pending, for at most `wait_s` seconds, and leave."""
        until = time.monotonic() + wait_s
        while not self.flush() and time.monotonic() < until:
            time.sleep(0.01)
        self._disconnect()

    def _send_first(self) -> None:
        assert self._socket is not None
        _, line = self._pending[0]
        self._sent += self._socket.send(line[self._sent :])
        if self._sent == len(line):
            self._forget_first()

    def _forget_first(self) -> None:
        _, line = self._pending.popleft()
        self._pending_bytes -= len(line)
        self._sent = 0

    def _connected(self) -> socket.socket | None:
        if self._socket is None and time.monotonic() >= self._retry_at:
            self._retry_at = time.monotonic() + _RETRY_S
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.setblocking(False)
            try:
                connection.connect(self.path)
            except OSError:
                connection.close()
            else:
                self._socket = connection
        return self._socket

    def _disconnect(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None
        if self._sent:  # half a line went to the old listener; the new one starts with a whole one
            self._count_drop(self._pending[0][0])
            self._forget_first()

    def _count_drop(self, rid: str, *, ended: bool = False) -> None:
        self.dropped += 1
        if not ended:
            self._dropped_of[rid] = self._dropped_of.get(rid, 0) + 1
