"""The decoding steps of one request, read from the broker stream and summed up."""

from __future__ import annotations

import json
from typing import Any

import redis

from app.services import broker

_BATCH = 500  # records taken at once


class StepReader:
    """Reads the records of one request from where the stream ended when this was made."""

    def __init__(self, deployment_id: str, request_id: str) -> None:
        self._stream = broker.trace_stream(deployment_id)
        self._request_id = request_id
        self.lost: str | None = None
        """Why the stream can't be read any more."""
        self._last = self._ask(self._end) or "0-0"

    def take(self) -> list[dict[str, Any]]:
        """Records of this request that have arrived since; never waits for more."""
        found: list[dict[str, Any]] = []
        while not self.lost:
            entries = self._ask(self._next) or []
            for entry_id, fields in entries:
                self._last = entry_id
                record = json.loads(fields["record"])
                if self._request_id in record.get("request_id", ""):
                    found.append(record)
            if len(entries) < _BATCH:
                break
        return found

    def _end(self) -> str:
        newest: Any = broker.client().xrevrange(self._stream, count=1)
        return str(newest[0][0]) if newest else "0-0"

    def _next(self) -> Any:
        return broker.client().xrange(self._stream, min=f"({self._last}", count=_BATCH)

    def _ask(self, question: Any) -> Any:
        try:
            return question()
        except (redis.RedisError, OSError) as error:
            self.lost = str(error) or type(error).__name__
            return None


class Tally:
    """Sums over the steps of one request, as FORMATS 4.7 defines them."""

    def __init__(self) -> None:
        self.steps = 0
        """Steps that drafted."""
        self.drafted = 0
        self.accepted = 0
        self.tokens = 0
        self.dropped = 0
        self.missing = 0
        """Gaps in the numbering of steps."""
        self.ended = False
        self._per_position: list[int] = []
        self._seen = 0
        self._first: float | None = None
        self._last = 0.0
        self._after_first = 0

    def add(self, record: dict[str, Any]) -> None:
        if record["ev"] == "step":
            self._add_step(record)
        elif record["ev"] == "end":
            self.ended = True
            self.dropped = int(record.get("dropped") or 0)

    def _add_step(self, step: dict[str, Any]) -> None:
        drafted, accepted, emitted = len(step["drafted"]), step["accepted"], len(step["emitted"])
        self._seen += 1
        self.missing = max(self.missing, step["step"] + 1 - self._seen)
        self.tokens += emitted
        if self._first is None:
            self._first = step["t"]
        else:
            self._after_first += emitted
        self._last = step["t"]
        if drafted:
            self.steps += 1
            self.drafted += drafted
            self.accepted += accepted
            self._per_position += [0] * (drafted - len(self._per_position))
            for k in range(accepted):
                self._per_position[k] += 1

    def numbers(self) -> dict[str, Any]:
        """For the page: lengths and rates over the steps that drafted, speed after the first."""
        spent = self._last - self._first if self._first is not None else 0.0
        return {
            "accepted": self.accepted,
            "drafted": self.drafted,
            "steps": self.steps,
            "acceptance_length": 1 + self.accepted / self.steps if self.steps else None,
            "acceptance_rate": self.accepted / self.drafted if self.drafted else None,
            "tokens": self.tokens,
            "tokens_per_second": self._after_first / spent if spent > 0 else None,
            "per_position": [count / self.steps for count in self._per_position],
        }

    def agrees(self, server: dict[str, Any]) -> bool:
        """Whether the server's per-request numbers are the same sums."""
        return (self.steps, self.drafted, self.accepted) == (
            server.get("num_spec_steps"),
            server.get("num_draft_tokens"),
            server.get("num_accepted_draft_tokens"),
        )
