"""The text of one chat answer, streamed from a deployment's OpenAI-compatible server.

A thread of its own reads the connection, so that the caller can watch the trace at the same time;
`close` ends the connection whatever the thread waits for, and the server then aborts the request.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import httpx

from app.services.views import DeploymentView
from speculators_core.params import SamplingParams

_CONNECT_S = 5.0
_SILENCE_S = 120.0  # between two pieces of an answer
_DONE = "[DONE]"


class Answer:
    """An answer on its way. `text`, `error`, … change only inside `take`."""

    def __init__(
        self,
        deployment: DeploymentView,
        request_id: str,
        messages: Sequence[Mapping[str, str]],
        sampling: SamplingParams,
        *,
        plain: bool,
    ) -> None:
        self.text = ""
        self.tokens = 0
        self.error: str | None = None
        self.ended: float | None = None
        """When it ended (monotonic clock)."""
        self.server_counts: dict[str, Any] | None = None
        """The server's own acceptance numbers of this request."""
        self._first: float | None = None
        self._last = 0.0
        self._url = f"{deployment.endpoint}/v1/chat/completions"
        self._body = request_body(deployment.served_name, messages, sampling, plain=plain)
        self._id = request_id
        self._pieces: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._socket: socket.socket | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._read, name=request_id, daemon=True).start()

    @property
    def age(self) -> float:
        """Seconds since the first text."""
        return time.monotonic() - self._first if self._first else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens after the first piece over the time they took; 0 tokens are not counted."""
        if self._first is None or self._last <= self._first or self.tokens < 2:
            return None
        return (self.tokens - 1) / (self._last - self._first)

    def take(self, wait_s: float) -> None:
        """Take in all that has arrived; wait for the first piece at most `wait_s`."""
        with suppress(Empty):
            self._add(self._pieces.get(timeout=wait_s) if wait_s else self._pieces.get_nowait())
            while True:
                self._add(self._pieces.get_nowait())

    def close(self) -> None:
        """End the connection, at once and from any thread."""
        self._closed.set()
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _add(self, piece: dict[str, Any]) -> None:
        if "error" in piece:
            self.error = self.error or str(piece["error"])
        if "end" in piece:
            self.ended = time.monotonic()
        for choice in piece.get("choices") or ():
            self._add_text(choice.get("delta", {}).get("content") or "")
        if usage := piece.get("usage"):
            self.tokens = int(usage.get("completion_tokens") or self.tokens)
        if metrics := piece.get("metrics"):
            self.server_counts = metrics.get("speculative_decoding") or self.server_counts

    def _add_text(self, text: str) -> None:
        if text:
            self._last = time.monotonic()
            self._first = self._first or self._last
            self.text += text

    def _read(self) -> None:
        try:
            self._stream()
        except (httpx.HTTPError, ValueError, OSError) as error:
            if not self._closed.is_set():
                self._pieces.put({"error": _connection_lost(error)})
        finally:
            self._pieces.put({"end": True})

    def _stream(self) -> None:
        timeout = httpx.Timeout(_SILENCE_S, connect=_CONNECT_S)
        headers = {"X-Request-Id": self._id}
        with (
            httpx.Client(timeout=timeout, trust_env=False) as client,
            client.stream("POST", self._url, json=self._body, headers=headers) as reply,
        ):
            stream = reply.extensions.get("network_stream")
            self._socket = stream.get_extra_info("socket") if stream else None
            if reply.status_code != 200:
                self._pieces.put({"error": _refusal(reply.status_code, reply.read())})
                return
            for line in reply.iter_lines():
                if self._closed.is_set():
                    return
                self._line(line)

    def _line(self, line: str) -> None:
        if not line.startswith("data:"):
            return
        data = line.removeprefix("data:").strip()
        if data == _DONE:
            return
        piece = json.loads(data)
        if isinstance(piece.get("error"), dict):
            piece["error"] = piece["error"].get("message")
        self._pieces.put(piece)


def request_body(
    model: str,
    messages: Sequence[Mapping[str, str]],
    sampling: SamplingParams,
    *,
    plain: bool,
) -> dict[str, Any]:
    """A chat request; temperature is always said, servers' defaults differ."""
    body: dict[str, Any] = {
        "model": model,
        "messages": list(messages),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stream": True,
        "stream_options": {"include_usage": True},
        "vllm_xargs": {"trace": "1", **({"speculate": "0"} if plain else {})},
    }
    if sampling.top_k:
        body["top_k"] = sampling.top_k
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    return body


def _refusal(status: int, content: bytes) -> str:
    try:
        found = json.loads(content)
        message = found["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = content.decode(errors="replace")[:300]
    return f"The server refused the request ({status}): {message}"


def _connection_lost(error: Exception) -> str:
    if isinstance(error, httpx.ConnectError):
        return "The deployment's server can't be reached. Is it still running?"
    return f"The connection to the server was lost: {error or type(error).__name__}"
