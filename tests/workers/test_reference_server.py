"""The reference server as a client sees it: a real process, tiny models, a listening trace."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from speculators_core.data.regenerate import regenerate
from speculators_core.evaluate.evaluate import evaluate
from speculators_core.params import EvaluateParams, RegenerateParams
from tests import tiny
from workers import reference_server
from workers.metrics import scrape

ROOT = Path(__file__).resolve().parents[2]
KEY = "a-key"
NAME = "tiny-pair"
MESSAGES = [{"role": "user", "content": "one two three one two three"}]


@dataclass
class Running:
    url: str
    client: httpx.Client
    events: queue.Queue[dict[str, Any]]

    def chat(self, **body: Any) -> httpx.Response:
        request_id = body.pop("x_request_id", None)
        headers = {"X-Request-Id": request_id} if request_id else {}
        values = {"model": NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": 20, **body}
        return self.client.post("/v1/chat/completions", json=values, headers=headers)

    def trace_of(self, request_id: str) -> list[dict[str, Any]]:
        """The events of one request, up to its end."""
        events = []
        while not events or events[-1]["ev"] != "end":
            event = self.events.get(timeout=20)
            if request_id in event["rid"]:
                events.append(event)
        return events


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def command(verifier: Path, port: int, *more: str) -> list[str]:
    server = [sys.executable, "-m", "workers.reference_server", "--verifier", str(verifier)]
    return [*server, "--port", str(port), "--served-name", NAME, *more]


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    verifier = tiny.build_verifier(folder / "verifier")
    return verifier, tiny.build_speculator(folder / "speculator", verifier)


@pytest.fixture(scope="module")
def server(pair, tmp_path_factory) -> Iterator[Running]:
    verifier, speculator = pair
    path = tmp_path_factory.mktemp("t") / "s"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    events: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=collect, args=(listener, events), daemon=True).start()
    port = free_port()
    process = subprocess.Popen(
        command(
            verifier, port, "--speculator", str(speculator), "--speculative-tokens", "3"
        ),
        cwd=ROOT,
        env={
            **os.environ,
            "SPECLAB_TRACE_SOCKET": str(path),
            "SPECLAB_SERVER_KEY": KEY,
            "OMP_NUM_THREADS": "1",
        },
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    client = httpx.Client(
        base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60, trust_env=False
    )
    try:
        wait_healthy(process, url)
        yield Running(url, client, events)
    finally:
        process.terminate()
        assert process.wait(20) in (0, -15)


def collect(listener: socket.socket, events: queue.Queue[dict[str, Any]]) -> None:
    connection, _ = listener.accept()
    for line in connection.makefile():
        events.put(json.loads(line))


def wait_healthy(process: subprocess.Popen[bytes], url: str) -> None:
    until = time.monotonic() + 180
    while time.monotonic() < until:
        assert process.poll() is None, "the server ended while starting"
        try:
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise AssertionError("the server was not healthy within three minutes")


def chunks(reply: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_an_answer_has_text_usage_and_its_own_speculation_counts(server):
    reply = server.chat(x_request_id="whole-1", return_token_ids=True).json()
    assert reply["id"] == "chatcmpl-whole-1"
    choice = reply["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] in ("stop", "length")
    assert reply["usage"]["completion_tokens"] == len(choice["token_ids"])
    counts = reply["metrics"]["speculative_decoding"]
    assert counts["num_spec_tokens"] == 3
    assert len(counts["per_step_accepted"]) == counts["num_spec_steps"] > 0
    assert sum(counts["acceptance_histogram"]) == counts["num_spec_steps"]
    assert counts["num_draft_tokens"] == 3 * counts["num_spec_steps"]


def test_a_stream_carries_the_same_text_and_its_counts_with_the_usage(server):
    whole = server.chat().json()
    pieces = chunks(server.chat(stream=True, stream_options={"include_usage": True}))
    assert pieces[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(p["choices"][0]["delta"].get("content", "") for p in pieces if p["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert pieces[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert pieces[-1]["choices"] == []
    assert pieces[-1]["usage"] == whole["usage"]
    assert pieces[-1]["metrics"] == whole["metrics"]
    assert "usage" not in chunks(server.chat(stream=True))[-1]


def test_the_trace_tells_every_step_and_agrees_with_the_answer(server):
    reply = server.chat(x_request_id="traced-1", return_token_ids=True).json()
    start, *steps, end = server.trace_of("traced-1")
    assert start["ev"] == "start"
    assert start["rid"].startswith("chatcmpl-traced-1-")
    assert (start["k"], start["prompt_tokens"]) == (3, reply["usage"]["prompt_tokens"])
    assert [step["step"] for step in steps] == list(range(len(steps)))
    emitted = [token for step in steps for token in step["emitted"]]
    assert emitted == reply["choices"][0]["token_ids"]
    counts = reply["metrics"]["speculative_decoding"]
    assert [s["accepted"] for s in steps if s["drafted"]] == counts["per_step_accepted"]
    assert steps[0]["drafted"] == [] and len(steps[1]["p_draft"]) == 3
    assert (end["status"], end["dropped"]) == (reply["choices"][0]["finish_reason"], 0)


def test_a_request_may_opt_out_of_speculation_and_gets_the_same_text(server):
    drafted = server.chat().json()
    plain = server.chat(vllm_xargs={"speculate": "0"}, x_request_id="plain-1").json()
    assert plain["choices"] == drafted["choices"]
    assert plain["metrics"]["speculative_decoding"]["num_spec_steps"] == 0
    assert "per_step_accepted" not in plain["metrics"]["speculative_decoding"]
    start, *steps, _ = server.trace_of("plain-1")
    assert start["k"] == 0
    assert all(step["drafted"] == [] for step in steps)


def test_a_completion_takes_text_or_tokens(server):
    body = {"model": NAME, "temperature": 0, "max_tokens": 6, "ignore_eos": True}
    text = server.client.post("/v1/completions", json={**body, "prompt": "abc"}).json()
    ids = tiny.byte_tokenizer()("abc")["input_ids"]
    tokens = server.client.post("/v1/completions", json={**body, "prompt": ids}).json()
    assert text["choices"] == tokens["choices"]
    assert text["usage"]["completion_tokens"] == 6
    streamed = server.client.post("/v1/completions", json={**body, "prompt": "abc", "stream": True})
    joined = "".join(piece["choices"][0]["text"] for piece in chunks(streamed))
    assert joined == text["choices"][0]["text"]


def test_sampling_with_a_seed_is_repeatable(server):
    def sampled(seed: int) -> list[int]:
        reply = server.chat(temperature=1.0, top_p=0.9, seed=seed, return_token_ids=True)
        return list(reply.json()["choices"][0]["token_ids"])

    assert sampled(1) == sampled(1) != sampled(2)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"logprobs": True}, 400, "the reference engine does not support logprobs"),
        ({"n": 2}, 400, "n: Input should be 1"),
        ({"temperature": -1}, 400, "temperature: Input should be greater than or equal to 0"),
        ({"vllm_xargs": {"what": "1"}}, 400, "vllm_xargs"),
        ({"model": "other"}, 404, "the model 'other' does not exist, this is 'tiny-pair'"),
        ({"messages": [{"role": "king", "content": "x"}]}, 400, "the role is 'king'"),
        ({"messages": []}, 400, "messages should be a list of turns"),
        (
            {"messages": [{"role": "user", "content": "x" * 3000}]},
            400,
            "the verifier's context is 2048",
        ),
    ],
)
def test_what_can_not_be_honoured_is_refused_with_a_sentence(server, body, status, message):
    reply = server.chat(**body)
    assert reply.status_code == status
    assert message in reply.json()["error"]["message"]


def test_a_field_given_as_null_counts_as_not_given(server):
    assert server.chat(stop=None, seed=None).status_code == 200


def test_without_the_key_nothing_is_answered_but_health_and_metrics(server):
    anonymous = httpx.Client(base_url=server.url, trust_env=False)
    assert anonymous.get("/v1/models").status_code == 401
    assert anonymous.post("/v1/chat/completions", json={}).status_code == 401
    assert anonymous.get("/health").status_code == 200
    assert anonymous.get("/metrics").status_code == 200
    assert server.client.get("/v1/models").json()["data"][0]["id"] == NAME


def test_the_counters_move_by_what_the_requests_tell(server):
    before = scrape(server.url)
    counts = server.chat().json()["metrics"]["speculative_decoding"]
    moved = scrape(server.url).since(before)
    assert moved.steps == counts["num_spec_steps"]
    assert moved.drafted == counts["num_draft_tokens"]
    assert moved.accepted == counts["num_accepted_draft_tokens"]
    assert sum(moved.per_position) == moved.accepted


def test_a_client_that_leaves_ends_its_answer_and_frees_the_queue(server):
    long = {"max_tokens": 1900, "ignore_eos": True, "stream": True}
    values = {"model": NAME, "messages": MESSAGES, "temperature": 0, **long}
    headers = {"X-Request-Id": "left-1"}
    with server.client.stream(
        "POST", "/v1/chat/completions", json=values, headers=headers
    ) as reply:
        next(reply.iter_lines())
    assert server.chat(max_tokens=2).status_code == 200
    events = server.trace_of("left-1")
    assert events[-1]["status"] == "abort"
    assert len(events) < 1000


def test_requests_are_answered_in_the_order_they_came(server):
    finished: list[int] = []

    def ask(i: int) -> None:
        server.chat(max_tokens=40, ignore_eos=True)
        finished.append(i)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    assert finished == [0, 1, 2, 3]


def test_evaluating_the_server_gives_what_the_engine_gives_itself(
    server, pair, tmp_path, monkeypatch
):
    monkeypatch.setenv("SPECLAB_SERVER_KEY", KEY)
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"tell me {i}"}) + "\n" for i in range(3)))
    params = EvaluateParams(
        speculator=str(pair[1]), verifier=str(pair[0]), data=str(data), max_tokens=12,
        plain_samples=1,
    )  # fmt: skip
    own = evaluate(params)
    theirs = evaluate(params.model_copy(update={"engine": server.url}))
    same = ("acceptance_length", "acceptance_rate", "per_position", "interval", "steps", "tokens")
    assert {k: getattr(theirs, k) for k in same} == {k: getattr(own, k) for k in same}
    assert theirs.tokens_per_second_plain > 0
    assert theirs.settings.engine == server.url
    assert theirs.settings.engine_version.startswith("reference")


def test_a_busy_port_and_a_wrong_verifier_end_the_start_with_a_sentence(pair, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = subprocess.run(
            command(pair[0], taken.getsockname()[1]), cwd=ROOT, capture_output=True, text=True
        )
    assert busy.returncode == 1
    assert "Address already in use" in busy.stderr
    assert "Traceback" not in busy.stderr
    wrong = subprocess.run(
        command(tmp_path / "none", free_port()), cwd=ROOT, capture_output=True, text=True
    )
    assert wrong.returncode == 1
    assert "not a directory" in wrong.stderr


def test_answers_made_anew_through_the_server_are_those_made_in_process(
    server, pair, tmp_path, monkeypatch
):
    data = tmp_path / "questions.jsonl"
    rows = [{"messages": [*MESSAGES, {"role": "assistant", "content": "old"}, *MESSAGES]}]
    rows += [{"prompt": f"say {i}"} for i in range(3)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = {"data": str(data), "verifier": str(pair[0]), "max_tokens": 12}
    monkeypatch.setenv("SPECLAB_ENDPOINT_KEY", KEY)
    monkeypatch.setenv("SPECLAB_ENDPOINT_URL", server.url)
    served = regenerate(
        RegenerateParams.model_validate({**asked, "endpoint": f"{server.url}/v1"}),
        tmp_path / "served",
    )
    here = regenerate(RegenerateParams.model_validate(asked), tmp_path / "here")
    assert (served.model, served.samples, served.tokens) == (NAME, 4, here.tokens)
    assert Path(served.output).read_text() == Path(here.output).read_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_models_are_loaded_in_the_precision_that_was_asked_for(pair, dtype):
    verifier, speculator = map(str, pair)
    service = reference_server.load(verifier, speculator, 2, NAME, dtype)
    assert str(service.verifier.model.dtype) == f"torch.{dtype}"
    assert str(service.speculative.drafter.draft.fc.weight.dtype) == f"torch.{dtype}"
