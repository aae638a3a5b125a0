"""What the reference server counts: per request, and for /metrics under vLLM's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from speculators_core.decode.engine import Step

_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Tally:
    """One request's speculation; `told` is vLLM's `metrics.speculative_decoding`, detailed."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.accepted: list[int] = []  # one entry a step that drafted
        self.drafted: list[int] = []
        self.tokens = 0

    def add(self, step: Step) -> None:
        self.tokens += len(step.emitted)
        if step.drafted:
            self.accepted.append(step.accepted)
            self.drafted.append(len(step.drafted))

    def told(self) -> dict[str, Any]:
        steps, accepted, drafted = len(self.accepted), sum(self.accepted), sum(self.drafted)
        counts: dict[str, Any] = {
            "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": [self.accepted.count(a) for a in range(self.k + 1)],
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": self.k,
        }
        if steps:
            counts |= {"per_step_accepted": self.accepted, "per_step_drafted": self.drafted}
        return counts


class ServerMetrics:
    """Counters since the server started."""

    def __init__(self, model: str, k: int) -> None:
        self.registry = CollectorRegistry()
        self.labels = {"model_name": model, "engine": "0"}
        self._drafts = self._made(Counter, "spec_decode_num_drafts", "steps that drafted")
        self._drafted = self._made(Counter, "spec_decode_num_draft_tokens", "tokens drafted")
        self._accepted = self._made(
            Counter, "spec_decode_num_accepted_tokens", "drafted tokens accepted"
        )
        at = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "steps that accepted the token at a position",
            (*self.labels, "position"),
            registry=self.registry,
        )
        self._at = [at.labels(**self.labels, position=str(i)) for i in range(k)]
        self._generated = self._made(Counter, "generation_tokens", "tokens emitted")
        self._prompted = self._made(Counter, "prompt_tokens", "prompt tokens read")
        self._finished = Counter(
            "vllm:request_success",
            "answers that ended",
            (*self.labels, "finished_reason"),
            registry=self.registry,
        )
        self.running = self._made(Gauge, "num_requests_running", "answers in the making")
        self.waiting = self._made(Gauge, "num_requests_waiting", "requests in the queue")
        self.first_token = self._made(
            Histogram, "time_to_first_token_seconds", "until the first token", buckets=_SECONDS
        )
        self.whole = self._made(
            Histogram, "e2e_request_latency_seconds", "until the last token", buckets=_SECONDS
        )

    def prompt(self, tokens: int) -> None:
        self._prompted.inc(tokens)

    def step(self, step: Step) -> None:
        self._generated.inc(len(step.emitted))
        if step.drafted:
            self._drafts.inc()
            self._drafted.inc(len(step.drafted))
            self._accepted.inc(step.accepted)
            for position in self._at[: step.accepted]:
                position.inc()

    def finished(self, reason: str) -> None:
        self._finished.labels(**self.labels, finished_reason=reason).inc()

    def text(self) -> bytes:
        """The exposition that Prometheus reads."""
        return generate_latest(self.registry)

    def _made(self, kind: Callable[..., Any], name: str, about: str, **more: Any) -> Any:
        metric = kind(f"vllm:{name}", about, tuple(self.labels), registry=self.registry, **more)
        return metric.labels(**self.labels)
