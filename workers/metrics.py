"""A server's own counters of speculation, read from /metrics (Prometheus text).

vLLM's exporter adds `_total` to counter names, other builds do not: both are read. Series of
several engines are summed. Counters restart at zero with the server, so a delta that would be
negative in any counter is no delta.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

import httpx

from speculators_core.errors import Unavailable

_NAMES = {
    "vllm:spec_decode_num_drafts": "steps",
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:generation_tokens": "tokens",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
}
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
_SAMPLE = re.compile(r"^([\w:]+?)(?:_total)?(?:\{(.*)\})? ([-+.\deEinfa]+)(?: \d+)?$")
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class Counters:
    """What a server has counted since it started; gauges `running` and `waiting` are of now."""

    steps: int = 0
    """Steps that drafted."""
    drafted: int = 0
    accepted: int = 0
    per_position: tuple[int, ...] = ()
    """Steps that accepted position k and all before it."""
    tokens: int = 0
    running: int = 0
    waiting: int = 0

    @property
    def acceptance_length(self) -> float | None:
        return 1 + self.accepted / self.steps if self.steps else None

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    def since(self, earlier: Counters) -> Counters | None:
        """What was counted in between; None when the server restarted in between."""
        width = max(len(self.per_position), len(earlier.per_position))
        before = earlier.per_position + (0,) * (width - len(earlier.per_position))
        after = self.per_position + (0,) * (width - len(self.per_position))
        delta = Counters(
            self.steps - earlier.steps,
            self.drafted - earlier.drafted,
            self.accepted - earlier.accepted,
            tuple(b - a for a, b in zip(before, after, strict=True)),
            self.tokens - earlier.tokens,
            self.running,
            self.waiting,
        )
        counted = (delta.steps, delta.drafted, delta.accepted, delta.tokens, *delta.per_position)
        return delta if min(counted) >= 0 else None


def scrape(endpoint: str, timeout_s: float = 5.0) -> Counters:
    """Read the counters of the server at `endpoint` (base URL without /v1)."""
    try:
        reply = httpx.get(f"{endpoint}/metrics", timeout=timeout_s)
        reply.raise_for_status()
    except httpx.HTTPError as error:
        raise Unavailable(
            f"the server's metrics can't be read: {error}", where=f"{endpoint}/metrics"
        ) from error
    return parse(reply.text)


def parse(text: str) -> Counters:
    """Counters from Prometheus text; names that are absent count zero."""
    sums: defaultdict[str, float] = defaultdict(float)
    positions: defaultdict[int, float] = defaultdict(float)
    for name, labels, value in _samples(text):
        if name in _NAMES:
            sums[_NAMES[name]] += value
        elif name == _PER_POSITION and (position := _POSITION.search(labels)):
            positions[int(position.group(1))] += value
    per_position = tuple(int(positions[i]) for i in range(max(positions, default=-1) + 1))
    return Counters(per_position=per_position, **{k: int(v) for k, v in sums.items()})


def _samples(text: str) -> list[tuple[str, str, float]]:
    matches = (_SAMPLE.match(line) for line in text.splitlines() if not line.startswith("#"))
    return [(m.group(1), m.group(2) or "", float(m.group(3))) for m in matches if m]
