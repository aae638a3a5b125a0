"""The playground service against a real vLLM server, and against stand-ins that misbehave."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
import redis

from app.services import deployments, playground, steps
from app.services.playground import PlaygroundUpdate
from app.services.views import DeploymentView
from app.store.engine import writing
from app.store.models import DeploymentPhase, Run, RunState, TraceMode, now
from speculators_core.errors import NotFound, Unavailable
from speculators_core.params import SamplingParams
from workers.metrics import scrape

ASK = [{"role": "user", "content": "Count with me: one two three one two three"}]


def answer(
    deployment: DeploymentView,
    *,
    plain: bool = False,
    question: str = "Count with me: one two three one two three",
    **sampling,
) -> list[PlaygroundUpdate]:
    sampling = SamplingParams(**{"max_tokens": 60, **sampling})
    messages = [{"role": "user", "content": question}]
    return list(playground.generate(deployment.id, messages, sampling, user="ada", plain=plain))


def steps_of(updates: list[PlaygroundUpdate]) -> list[dict[str, Any]]:
    return [step for update in updates for step in update.steps]


class Stream:
    """What a stand-in server answers: pieces of text, each after a pause."""

    def __init__(self) -> None:
        self.pieces: list[str] = ["one ", "two ", "three"]
        self.pause_s = 0.05
        self.tail: list[dict[str, Any]] = [{"choices": [], "usage": {"completion_tokens": 3}}]
        self.status = 200
        self.body: dict[str, Any] = {}
        self.request_id = ""
        self.hung_up = threading.Event()
        self.on_piece = lambda i: None


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    """A deployment (id `d`) whose server is a stand-in; its trace is whatever a test puts there."""
    state = Stream()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            state.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.request_id = self.headers["X-Request-Id"]
            self.send_response(state.status)
            self.end_headers()
            if state.status != 200:
                self.wfile.write(b'{"error": {"message": "min_p is not supported"}}')
                return
            try:
                for i, piece in enumerate(state.pieces):
                    time.sleep(state.pause_s)
                    state.on_piece(i)
                    self.say({"choices": [{"delta": {"content": piece}}]})
                for piece in state.tail:
                    self.say(piece)
                self.wfile.write(b"data: [DONE]\n\n")
            except OSError:
                state.hung_up.set()

        def say(self, piece: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())
            self.wfile.flush()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    show(monkeypatch, f"http://127.0.0.1:{server.server_address[1]}")
    yield state
    server.shutdown()
    server.server_close()


def show(monkeypatch: pytest.MonkeyPatch, endpoint: str | None, **changes: Any) -> None:
    """Let `deployments.get` give a deployment."""
    values = {
        "id": "d", "name": "stand-in", "owner": "ada", "state": RunState.RUNNING,
        "phase": DeploymentPhase.READY, "engine": "vllm", "verifier": "v", "speculator": None,
        "speculative_tokens": 3, "served_name": "m", "endpoint": endpoint, "command": None,
        "trace_mode": TraceMode.IDS, "server_pgid": None, "server_started": None, "notes": [],
        "dropped_records": 0, "host": None, "created_at": now(), "started_at": None,
        "ready_at": None, "finished_at": None, "progress_text": "", "error": None, "params": {},
    }  # fmt: skip
    view = DeploymentView(**{**values, **changes})
    monkeypatch.setattr(deployments, "get", lambda _: view)


class Broker:
    """A stream with what a test put into it; `away` makes it unreachable."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, dict[str, str]]] = []
        self.away = False

    def put(self, record: dict[str, Any]) -> None:
        self.entries.append((f"{len(self.entries)}-1", {"record": json.dumps(record)}))

    def xrevrange(self, _: str, count: int) -> list[Any]:
        self._reach()
        return self.entries[-1:]

    def xrange(self, _: str, min: str, count: int) -> list[Any]:
        self._reach()
        after = min.removeprefix("(")
        known = [entry_id for entry_id, _ in self.entries]
        return self.entries[known.index(after) + 1 if after in known else 0 :][:count]

    def _reach(self) -> None:
        if self.away:
            raise redis.ConnectionError("connection refused")


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch, sqlite_store: str) -> Broker:
    with writing() as session:
        run = Run(id="d", kind="deploy", name="d", params={}, fingerprint="", owner="ada")
        session.add(run)
    fake = Broker()
    monkeypatch.setattr(steps.broker, "client", lambda: fake)
    monkeypatch.setattr(playground, "_LAST_STEPS_S", 0.3)
    monkeypatch.setattr(playground, "_TRACE_PATIENCE_S", 0.1)
    return fake


def step(rid: str, i: int, accepted: int, words: list[str], drafted: int = 3) -> dict[str, Any]:
    return {
        "ev": "step", "request_id": rid, "step": i, "t": 10.0 + i, "accepted": accepted,
        "drafted": [{"id": 1, "text": "x"}] * drafted, "context_len": 5,
        "emitted": [{"id": 1, "text": word, "source": "draft"} for word in words],
    }  # fmt: skip


def end(rid: str, dropped: int = 0) -> dict[str, Any]:
    return {"ev": "end", "request_id": rid, "t": 20.0, "status": "stop", "dropped": dropped}


def tracing(stream: Stream, broker: Broker, *, dropped: int = 0, skip: int = -1) -> None:
    """Each piece of text is a step of the trace; then its end."""

    def put(i: int) -> None:
        rid = f"chatcmpl-{stream.request_id}-1234abcd"
        if i != skip:
            broker.put(step(rid, i, min(i, 3), [stream.pieces[i]], drafted=3 if i else 0))
        if i == len(stream.pieces) - 1:
            broker.put(end(rid, dropped))

    stream.on_piece = put


def test_text_steps_and_numbers_arrive_together(stream: Stream, broker: Broker) -> None:
    broker.put(step("chatcmpl-somebody-else", 0, 3, ["no"]))
    tracing(stream, broker)
    updates = answer(deployments.get("d"))
    last = updates[-1]
    assert (last.state, last.message, last.text) == ("done", "", "one two three")
    assert [update.seq for update in updates] == list(range(len(updates)))
    assert [update.reset for update in updates] == [True] + [False] * (len(updates) - 1)
    assert [found["step"] for found in steps_of(updates)] == [0, 1, 2]
    numbers = last.numbers
    assert (numbers["steps"], numbers["drafted"], numbers["accepted"]) == (2, 6, 3)
    assert (numbers["acceptance_length"], numbers["acceptance_rate"]) == (2.5, 0.5)
    assert numbers["per_position"] == [1.0, 0.5, 0.0]
    assert (numbers["tokens"], numbers["tokens_per_second"]) == (3, 1.0)


def test_the_request_names_everything_that_decides_the_answer(stream: Stream, broker) -> None:
    answer(deployments.get("d"), plain=True, temperature=0.0, top_k=5, seed=3)
    assert stream.body["temperature"] == 0.0
    assert (stream.body["top_k"], stream.body["seed"], stream.body["top_p"]) == (5, 3, 1.0)
    assert stream.body["vllm_xargs"] == {"trace": "1", "speculate": "0"}
    assert stream.body["stream_options"] == {"include_usage": True}
    assert stream.request_id.startswith("play-")


def test_updates_are_at_most_thirty_a_second(stream: Stream, broker: Broker) -> None:
    stream.pieces, stream.pause_s = ["word "] * 300, 0.001
    tracing(stream, broker)
    began = time.monotonic()
    updates = answer(deployments.get("d"))
    assert len(updates) <= 30 * (time.monotonic() - began) + 3
    assert len(steps_of(updates)) == 300


def test_without_a_trace_the_text_comes_plain_and_says_so(stream: Stream, broker) -> None:
    last = answer(deployments.get("d"))[-1]
    assert (last.state, last.text) == ("done", "one two three")
    assert "No trace arrived" in last.message
    assert last.numbers["tokens"] == 3


def test_a_deployment_that_traces_nothing_is_no_failure(stream, broker, monkeypatch) -> None:
    show(monkeypatch, deployments.get("d").endpoint, trace_mode=TraceMode.OFF)
    last = answer(deployments.get("d"))[-1]
    assert (last.state, last.text) == ("done", "one two three")
    assert "publishes no trace" in last.message


def test_a_broker_that_is_away_is_told(stream: Stream, broker: Broker) -> None:
    broker.away = True
    last = answer(deployments.get("d"))[-1]
    assert (last.state, last.text) == ("done", "one two three")
    assert "connection refused" in last.message


@pytest.mark.parametrize("lost", [{"dropped": 1}, {"skip": 1}], ids=["dropped", "missing"])
def test_lost_steps_are_told(stream: Stream, broker: Broker, lost: dict[str, int]) -> None:
    tracing(stream, broker, **lost)
    last = answer(deployments.get("d"))[-1]
    assert last.state == "done"
    assert "1 steps of the trace were dropped" in last.message


def test_a_server_that_counted_otherwise_is_told(stream: Stream, broker: Broker) -> None:
    counts = {"num_spec_steps": 9, "num_draft_tokens": 27, "num_accepted_draft_tokens": 3}
    stream.tail = [{"choices": [], "metrics": {"speculative_decoding": counts}}]
    tracing(stream, broker)
    assert "counted other acceptance numbers" in answer(deployments.get("d"))[-1].message


def test_a_refusal_is_told_in_the_servers_words(stream: Stream, broker) -> None:
    stream.status = 400
    last = answer(deployments.get("d"))[-1]
    assert last.state == "failed"
    assert "(400): min_p is not supported" in last.message


def test_an_engine_that_dies_in_the_middle_fails_the_answer(stream: Stream, broker) -> None:
    stream.tail = [{"error": {"message": "EngineCore encountered an issue", "code": 500}}]
    last = answer(deployments.get("d"))[-1]
    assert (last.state, last.text) == ("failed", "one two three")
    assert "EngineCore encountered an issue" in last.message


def test_a_server_that_is_gone_fails_the_answer(broker, monkeypatch) -> None:
    show(monkeypatch, "http://127.0.0.1:9")
    last = answer(deployments.get("d"))[-1]
    assert last.state == "failed"
    assert "can't be reached" in last.message


def test_closing_it_hangs_up_and_keeps_what_came(stream: Stream, broker: Broker) -> None:
    stream.pieces = ["word "] * 200
    tracing(stream, broker)
    updates = playground.generate("d", ASK, SamplingParams(), user="ada")
    while not next(updates).text:
        pass
    updates.close()
    assert stream.hung_up.wait(3), "the server was left writing"
    (kept,) = playground.list_generations("ada")
    assert kept.numbers["state"] == "stopped"
    assert kept.text.startswith("word ")


def test_an_answer_is_its_authors_alone(stream: Stream, broker: Broker) -> None:
    tracing(stream, broker)
    run = answer(deployments.get("d"))[-1].run
    kept = playground.generation(run, "ada")
    assert (kept.text, len(kept.steps), kept.messages) == ("one two three", 3, ASK)
    with pytest.raises(NotFound):
        playground.generation(run, "bob")
    assert playground.list_generations("bob") == []


def test_a_deployment_that_is_not_ready_is_refused(monkeypatch) -> None:
    show(monkeypatch, None, phase=DeploymentPhase.LOADING)
    with pytest.raises(Unavailable, match=r"not ready \(loading\)"):
        answer(deployments.get("d"))


@pytest.mark.vllm
def test_steps_tell_the_answer_and_the_server_counts_the_same(vllm: DeploymentView) -> None:
    before = scrape(vllm.endpoint)
    updates = answer(vllm)
    last = updates[-1]
    assert (last.state, last.message) == ("done", "")
    found = steps_of(updates)
    assert [step["step"] for step in found] == list(range(len(found)))
    tokens = [token for step in found for token in step["emitted"]]
    assert "".join(token["text"] for token in tokens) == last.text
    assert len(tokens) == last.numbers["tokens"]
    for step in found:
        accepted = [token["id"] for token in step["drafted"][: step["accepted"]]]
        from_draft = [token["id"] for token in step["emitted"] if token["source"] == "draft"]
        assert from_draft == accepted[: len(from_draft)]
    counted = scrape(vllm.endpoint).since(before)
    assert counted is not None
    assert counted.steps > 0
    assert (counted.steps, counted.drafted, counted.accepted) == (
        last.numbers["steps"],
        last.numbers["drafted"],
        last.numbers["accepted"],
    )


@pytest.mark.vllm
@pytest.mark.parametrize("question", ["one two three", "Why is the sky blue?", "f(x) = x^2 + 1"])
def test_both_engines_draft_and_accept_the_same(
    vllm: DeploymentView, reference_deployment: DeploymentView, question: str
) -> None:
    traces = [
        [
            ([token["id"] for token in step["drafted"]], step["accepted"], step["context_len"])
            for step in steps_of(answer(deployment, question=question))
        ]
        for deployment in (vllm, reference_deployment)
    ]
    assert len(traces[0]) > 10
    assert traces[0] == traces[1]


@pytest.mark.vllm
def test_plain_decoding_on_the_same_server_gives_the_same_text(vllm: DeploymentView) -> None:
    speculated, plain = answer(vllm)[-1], answer(vllm, plain=True)[-1]
    assert plain.text == speculated.text
    assert (plain.numbers["drafted"], plain.message) == (0, "")
    assert speculated.numbers["drafted"] > 0


@pytest.mark.vllm
def test_closing_it_aborts_the_request_on_the_server(vllm: DeploymentView) -> None:
    before = scrape(vllm.endpoint).tokens
    updates = playground.generate(vllm.id, ASK, SamplingParams(max_tokens=400), user="ada")
    while not next(updates).steps:
        pass
    updates.close()
    until = time.monotonic() + 5
    while scrape(vllm.endpoint).running:
        assert time.monotonic() < until, "the request still runs"
        time.sleep(0.1)
    assert scrape(vllm.endpoint).tokens - before < 400  # it ended early
    assert httpx.get(f"{vllm.endpoint}/health").status_code == 200
