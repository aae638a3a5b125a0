"""From the engine's trace to what people see: ids become text, steps go to the broker stream, and
each finished request leaves one row of what it accepted.

The engine must never wait for any of this. A thread reads its socket as fast as it writes; when
the broker is away records are dropped and counted, and rows are kept until the store takes them.
"""

from __future__ import annotations

import json
import logging
import selectors
import shutil
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis

from app.services import acceptance, broker, deployments
from app.services.acceptance import RequestAcceptance
from app.settings import settings
from app.store.models import TraceMode
from speculators_core.decode.detokenize import Decodes, Detokenizer
from speculators_core.errors import CheckpointError, Unavailable
from workers.server import WARM_UP_ID

logger = logging.getLogger("job")

_READ_BYTES = 1 << 16
_WAIT_S = 0.2
_OPEN_REQUESTS = 4096  # beyond, the oldest is taken for one whose end was dropped
_KEPT_ROWS = 20_000  # while the store is away
_BROKER_RETRY_S = 1.0

Publish = Callable[[Sequence[dict[str, Any]]], None]


class Translator:
    """Engine events to stream records; sums up each request on the way."""

    def __init__(self, tokenizer: Decodes) -> None:
        self._tokenizer = tokenizer
        self._open: dict[str, _Request] = {}
        self.finished: deque[RequestAcceptance] = deque(maxlen=_KEPT_ROWS)
        self.dropped = 0
        self.placeholders = False
        """The engine hides which tokens were rejected: their ids are -1."""

    def record(self, event: dict[str, Any]) -> dict[str, Any]:
        """The stream record of an engine event. Raises `KeyError` for what is none."""
        rid = event["rid"]
        if event["ev"] == "start":
            self._begin(rid, event)
            return {"ev": "start", "request_id": rid, "t": event["t"], "k": event["k"]}
        if event["ev"] == "step":
            # a start that was dropped costs a request its beginning, not its steps
            request = self._open.get(rid) or self._begin(rid, event)
            self.placeholders = self.placeholders or -1 in event["drafted"]
            return request.step(event)
        return self._end(rid, event)

    def _begin(self, rid: str, event: dict[str, Any]) -> _Request:
        while len(self._open) >= _OPEN_REQUESTS:
            del self._open[next(iter(self._open))]
        detokenizer = Detokenizer(self._tokenizer, event.get("prompt_tail", ()))
        k = event.get("k", len(event.get("drafted", ())))
        self._open[rid] = _Request(rid, k, detokenizer)
        return self._open[rid]

    def _end(self, rid: str, event: dict[str, Any]) -> dict[str, Any]:
        dropped = int(event.get("dropped") or 0)
        self.dropped += dropped
        request = self._open.pop(rid, None)
        if request and request.tokens and WARM_UP_ID not in rid:
            self.finished.append(request.acceptance())
        return {
            "ev": "end",
            "request_id": rid,
            "t": event["t"],
            "status": event["status"],
            "dropped": dropped,
        }


class _Request:
    """A request whose end has not come."""

    def __init__(self, rid: str, k: int, detokenizer: Detokenizer) -> None:
        self.rid = rid
        self.k = k
        self.detokenizer = detokenizer
        self.accepted_per_step: list[int] = []
        self.drafted = 0
        self.tokens = 0
        self.context_len = 0

    def step(self, event: dict[str, Any]) -> dict[str, Any]:
        drafted, emitted, accepted = event["drafted"], event["emitted"], event["accepted"]
        self._count(event)
        known = [token for token in drafted if token >= 0]  # rejected placeholders have no text
        drafted_texts, emitted_texts = self.detokenizer.step(known, accepted, emitted)
        drafted_texts += [""] * (len(drafted) - len(known))
        return {
            "ev": "step",
            "request_id": self.rid,
            "step": event["step"],
            "t": event["t"],
            "drafted": [
                {"id": token, "text": text, "p_draft": p, "p_verifier": q}
                for token, text, p, q in zip(
                    drafted,
                    drafted_texts,
                    _each(event.get("p_draft"), len(drafted)),
                    _each(event.get("p_verifier"), len(drafted)),
                    strict=True,
                )
            ],
            "accepted": accepted,
            "emitted": [
                {"id": token, "text": text, "source": "draft" if i < accepted else "verifier"}
                for i, (token, text) in enumerate(zip(emitted, emitted_texts, strict=True))
            ],
            "draft_ms": event.get("draft_ms"),
            "verify_ms": event.get("verify_ms"),
            "context_len": event["context_len"],
        }

    def _count(self, event: dict[str, Any]) -> None:
        if event["drafted"]:
            self.accepted_per_step.append(event["accepted"])
            self.drafted += len(event["drafted"])
        self.tokens += len(event["emitted"])
        self.context_len = event["context_len"] + len(event["emitted"])

    def acceptance(self) -> RequestAcceptance:
        return RequestAcceptance(
            request_id=self.rid,
            accepted_per_step=tuple(self.accepted_per_step),
            drafted=self.drafted,
            tokens=self.tokens,
            context_len=self.context_len,
            speculative_tokens=max(self.k, *self.accepted_per_step, 0),
        )


class TraceRelay:
    """Listens at `path` from construction until `close`. For one deployment."""

    def __init__(
        self, deployment_id: str, tokenizer: Decodes, publish: Publish | None = None
    ) -> None:
        self.deployment_id = deployment_id
        self._directory = Path(tempfile.mkdtemp(prefix="speclab-"))  # 0700; a path has 107 bytes
        self.path = self._directory / "trace"
        self._translator = Translator(tokenizer)
        self._publish = publish or _to_stream(broker.trace_stream(deployment_id))
        self._unpublished = 0
        self._retry_at = 0.0
        self._told: dict[str, Any] = {}
        self._partial: dict[socket.socket, bytes] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="trace-relay", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Records that were lost, in the engine or on the way to the broker."""
        return self._translator.dropped + self._unpublished

    def settle(self) -> None:
        """Write finished requests and the number of drops to the store; what it refuses is kept."""
        finished = self._translator.finished
        batch = [finished.popleft() for _ in range(len(finished))]
        try:
            acceptance.record(self.deployment_id, batch)
        except Unavailable as error:
            finished.extendleft(reversed(batch))
            logger.warning("%s; %d acceptance rows wait", error.message, len(batch))
            return
        self._tell()

    def close(self) -> None:
        """Read what has arrived, settle, and leave no socket behind."""
        self._closing.set()
        self._thread.join()
        self.settle()
        for connection in [*self._partial, self._listener]:
            connection.close()
        self._selector.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _tell(self) -> None:
        """What has changed about the trace as a whole."""
        facts: dict[str, Any] = {"dropped_records": self.dropped} if self.dropped else {}
        if self._translator.placeholders:
            facts["trace_mode"] = TraceMode.COUNTS
        if facts != self._told:
            with suppress(Unavailable):
                deployments.update(self.deployment_id, **facts)
                self._told = facts

    def _listen(self) -> None:
        while True:
            ready = self._selector.select(0.0 if self._closing.is_set() else _WAIT_S)
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._receive(key.fileobj)  # type: ignore[arg-type]
            if not ready and self._closing.is_set():
                return

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        self._partial[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(_READ_BYTES)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(connection)
            self._partial.pop(connection)
            connection.close()
            return
        *lines, rest = (self._partial[connection] + data).split(b"\n")
        self._partial[connection] = rest
        self._send(list(self._records(lines)))

    def _records(self, lines: list[bytes]) -> Iterator[dict[str, Any]]:
        for line in lines:
            try:
                yield self._translator.record(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                self._unpublished += 1
                logger.warning("a trace event can't be read: %r in %.200r", error, line)

    def _send(self, records: list[dict[str, Any]]) -> None:
        if time.monotonic() < self._retry_at:
            self._unpublished += len(records)
            return
        try:
            self._publish(records)
        except (redis.RedisError, OSError) as error:
            self._unpublished += len(records)
            self._retry_at = time.monotonic() + _BROKER_RETRY_S
            logger.warning("the broker takes no trace records: %s", error)


def load_tokenizer(verifier: Path) -> Decodes:
    """The verifier's tokenizer, without torch where its directory has a tokenizer.json."""
    fast = verifier / "tokenizer.json"
    if fast.exists():
        from tokenizers import Tokenizer

        loaded: Decodes = Tokenizer.from_file(str(fast))
        return loaded
    from transformers import AutoTokenizer

    try:
        slow: Decodes = AutoTokenizer.from_pretrained(verifier)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the verifier's tokenizer can't be loaded: {error}",
            where=str(verifier),
            hint="is the directory complete? expected tokenizer.json",
        ) from error
    return slow


def _to_stream(stream: str) -> Publish:
    """Append records to a broker stream of bounded length, in one round trip."""
    length = settings().trace_stream_length

    def publish(records: Sequence[dict[str, Any]]) -> None:
        pipeline = broker.client().pipeline(transaction=False)
        for record in records:
            fields: Any = {"record": json.dumps(record, separators=(",", ":"))}
            pipeline.xadd(stream, fields, maxlen=length, approximate=True)
        pipeline.execute()

    return publish


def _each(values: Sequence[float] | None, count: int) -> Sequence[float | None]:
    return values if values is not None else [None] * count
