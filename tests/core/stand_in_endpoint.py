"""A stand-in for an OpenAI-compatible server: HTTP on 127.0.0.1 that says it is one.

It answers every chat with what was asked last, turned around, and fails as it is told to.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class StandInEndpoint:
    """The server's state. `faults`: what befalls the next requests, in order: a status, `cut` (the
    connection breaks) or `empty`; `refuse`: a word in a question that gives 400.
    """

    url: str = ""
    models: list[str] = field(default_factory=lambda: ["stand-in"])
    faults: list[int | str] = field(default_factory=list)
    refuse: str | None = None
    slowly: float = 0.0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    open: int = 0
    most_open: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    released: threading.Event = field(default_factory=threading.Event)


@contextmanager
def stand_in_endpoint() -> Iterator[StandInEndpoint]:
    state = StandInEndpoint()
    handler = type("Handler", (_Handler,), {"state": state})
    server = _Server(("127.0.0.1", 0), handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """A client that has gone is no fault here."""


class _Handler(BaseHTTPRequestHandler):
    state: StandInEndpoint
    protocol_version = "HTTP/1.1"
    server_version = "speclab-stand-in-endpoint"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._say(200, {"object": "list", "data": [{"id": name} for name in self.state.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.state.lock:
            self.state.bodies.append(body)
            self.state.keys.add(self.headers.get("Authorization"))
            fault = self.state.faults.pop(0) if self.state.faults else None
            self.state.open += 1
            self.state.most_open = max(self.state.most_open, self.state.open)
        if self.state.slowly:
            self.state.released.wait(self.state.slowly)
        with self.state.lock:
            self.state.open -= 1
        if fault == "cut":
            self.close_connection = True
            return
        asked = body["messages"][-1]["content"]
        if isinstance(fault, int):
            self._say(fault, {"error": {"message": "as told"}})
        elif self.state.refuse and self.state.refuse in asked:
            self._say(400, {"error": {"message": "too long"}})
        else:
            self._say(200, self._reply("" if fault == "empty" else asked[::-1]))

    def _reply(self, text: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        return {
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 10, "completion_tokens": len(text)},
        }

    def _say(self, status: int, values: dict[str, Any]) -> None:
        content = json.dumps(values).encode()
        self.send_response(status)
        if status == 429:
            self.send_header("Retry-After", "0")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
