"""The scheduler hooks on a stand-in for vLLM's scheduler: what its methods do to lists and when.

The real scheduler runs in test_vllm_server.py and test_playground.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from speculators_core.vllm_trace import opting_out, tracing

K = 3


class Writer:
    """Remembers events instead of sending them."""

    path = "nowhere"

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def write(self, event: Mapping[str, Any]) -> None:
        self.events.append(dict(event))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["ev"] == kind]


class Request:
    def __init__(self, rid: str, *, limit: int = 100, extra: dict[str, Any] | None = None) -> None:
        self.request_id = rid
        self.prompt_token_ids = [7] * 10
        self.num_prompt_tokens = 10
        self.output: list[int] = []
        self.limit = limit
        self.spec_token_ids: list[int] = []
        self.sampling_params = SimpleNamespace(extra_args=extra)
        self.reason: str | None = None

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output)

    def is_finished(self) -> bool:
        return self.reason is not None

    def get_finished_reason(self) -> str | None:
        return self.reason


class FakeScheduler:
    """As vLLM 0.32's in what the hooks rely on: trims `sampled` in place, frees within the step."""

    num_spec_tokens = K

    def __init__(self, *, method: str = "eagle3", asynchronous: bool = False) -> None:
        self.vllm_config = SimpleNamespace(speculative_config=SimpleNamespace(method=method))
        self.scheduler_config = SimpleNamespace(async_scheduling=asynchronous)
        self.requests: dict[str, Request] = {}

    @property
    def running(self) -> list[Request]:
        return list(self.requests.values())

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request

    def schedule(self) -> SimpleNamespace:
        return SimpleNamespace(
            num_scheduled_tokens={r.request_id: 1 + len(r.spec_token_ids) for r in self.running},
            scheduled_spec_decode_tokens={
                r.request_id: r.spec_token_ids for r in self.running if r.spec_token_ids
            },
            num_spec_tokens_to_schedule=K,
        )

    def update_from_output(self, scheduled: Any, computed: Any) -> dict[int, Any]:
        outputs = []
        for rid in scheduled.num_scheduled_tokens:
            request = self.requests.get(rid)
            if request is None or request.is_finished():
                continue
            sampled = computed.sampled_token_ids[computed.req_id_to_index[rid]]
            room = request.limit - len(request.output)
            if len(sampled) >= room:
                del sampled[room:]
                request.reason = "length"
            request.output += sampled
            outputs.append(SimpleNamespace(request_id=rid, new_token_ids=sampled))
            if request.is_finished():
                self._free_request(request)
        return {0: SimpleNamespace(outputs=outputs)}

    def finish_requests(self, rid: str, reason: str) -> None:
        self.requests[rid].reason = reason
        self._free_request(self.requests[rid])

    def _free_request(self, request: Request) -> None:
        del self.requests[request.request_id]


def sampled(**ids: list[int]) -> SimpleNamespace:
    return SimpleNamespace(
        sampled_token_ids=list(ids.values()),
        req_id_to_index={rid: i for i, rid in enumerate(ids)},
    )


def traced(**options: Any) -> tuple[Any, Writer]:
    writer = Writer()
    return tracing(opting_out(FakeScheduler), writer)(**options), writer  # type: ignore[arg-type]


def step(scheduler: Any, drafts: dict[str, list[int]], **ids: list[int]) -> None:
    for rid, draft in drafts.items():
        scheduler.requests[rid].spec_token_ids = draft
    scheduler.update_from_output(scheduler.schedule(), sampled(**ids))


def test_a_step_tells_what_was_drafted_accepted_and_emitted() -> None:
    scheduler, writer = traced()
    scheduler.add_request(Request("a"))
    step(scheduler, {}, a=[1])
    step(scheduler, {"a": [2, 3, 9]}, a=[2, 3, 4])
    start, prefill, drafted = writer.events
    assert (start["ev"], start["k"], start["prompt_tokens"]) == ("start", K, 10)
    assert start["prompt_tail"] == [7] * 6
    assert (prefill["drafted"], prefill["accepted"], prefill["emitted"]) == ([], 0, [1])
    assert (drafted["drafted"], drafted["accepted"]) == ([2, 3, 9], 2)
    assert drafted["emitted"] == [2, 3, 4]
    assert [prefill["context_len"], drafted["context_len"]] == [10, 11]
    assert [prefill["step"], drafted["step"]] == [0, 1]


def test_a_cut_answer_still_counts_all_that_was_accepted_and_its_end_comes_last() -> None:
    scheduler, writer = traced()
    scheduler.add_request(Request("a", limit=2))
    step(scheduler, {}, a=[1])
    step(scheduler, {"a": [2, 3, 4]}, a=[2, 3, 4, 5])
    *_, last, end = writer.events
    assert (last["accepted"], last["emitted"]) == (3, [2])
    assert (end["ev"], end["status"]) == ("end", "length")


def test_a_request_aborted_in_flight_leaves_no_step() -> None:
    scheduler, writer = traced()
    for rid in "ab":
        scheduler.add_request(Request(rid))
    scheduled = scheduler.schedule()
    scheduler.finish_requests("a", "abort")
    scheduler.update_from_output(scheduled, sampled(a=[1], b=[2]))
    assert [event["rid"] for event in writer.of("step")] == ["b"]
    assert [(event["rid"], event["status"]) for event in writer.of("end")] == [("a", "abort")]


def test_placeholders_become_ids_where_they_were_accepted() -> None:
    scheduler, writer = traced(asynchronous=True)
    scheduler.add_request(Request("a"))
    step(scheduler, {"a": [-1, -1, -1]}, a=[5, 6])
    assert writer.of("step")[0]["drafted"] == [5, -1, -1]
    assert writer.of("step")[0]["accepted"] == 1


def test_a_chunk_of_a_prompt_is_no_step() -> None:
    scheduler, writer = traced()
    scheduler.add_request(Request("a"))
    step(scheduler, {}, a=[])
    assert writer.of("step") == []


def test_a_request_that_opted_out_is_scheduled_without_drafts() -> None:
    scheduler, writer = traced()
    scheduler.add_request(Request("plain", extra={"speculate": "0"}))
    scheduler.add_request(Request("other", extra={"trace": "1"}))
    for request in scheduler.running:
        request.spec_token_ids = [1, 2, 3]
    scheduled = scheduler.schedule()
    assert list(scheduled.scheduled_spec_decode_tokens) == ["other"]
    assert scheduled.num_spec_tokens_to_schedule == K
    assert {event["rid"]: event["k"] for event in writer.of("start")} == {"plain": 0, "other": K}


@pytest.mark.parametrize(
    ("options", "drafts"),
    [({}, 0), ({"method": "ngram"}, K), ({"asynchronous": True}, K)],
)
def test_the_drafter_rests_when_nobody_speculates(options: dict[str, Any], drafts: int) -> None:
    scheduler, _ = traced(**options)
    scheduler.add_request(Request("plain", extra={"speculate": "0"}))
    assert scheduler.schedule().num_spec_tokens_to_schedule == drafts
