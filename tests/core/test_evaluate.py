"""What acceptance numbers mean, how prompts are read, and what a report holds."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from speculators_core.checkpoint import load_speculator
from speculators_core.decode.eagle import EagleDrafter
from speculators_core.decode.engine import SpeculativeDecoder
from speculators_core.decode.prompt import chat_ids
from speculators_core.errors import DataError, InputError, PairingError, Stopped, Unavailable
from speculators_core.evaluate.acceptance import Counts, acceptance
from speculators_core.evaluate.evaluate import evaluate
from speculators_core.evaluate.prompts import read_prompts
from speculators_core.models.verifier import load_verifier
from speculators_core.params import EvaluateParams, SamplingParams
from speculators_core.progress import Quiet
from tests import tiny


def counts(*histogram: int, k: int = 3, tokens: int = 0) -> Counts:
    return Counts(tuple(histogram), drafted=k * sum(histogram), tokens=tokens)


# what the numbers mean


def test_length_counts_the_verifiers_own_token_and_positions_are_joint():
    """CASES D2."""
    numbers = acceptance([counts(39, 1, 0, 3)], k=3)
    assert numbers.acceptance_length == pytest.approx(1 + 10 / 43)
    assert numbers.acceptance_rate == pytest.approx(10 / 129)
    assert numbers.per_position == pytest.approx([4 / 43, 3 / 43, 3 / 43])
    assert 1 + sum(numbers.per_position) == pytest.approx(numbers.acceptance_length)
    assert numbers.steps == 43


def test_answers_weigh_by_their_steps():
    """CASES D13: one step of length 4 beside 99 of length 1 is 1.03, not 2.5."""
    numbers = acceptance([counts(0, 0, 0, 1), counts(99, 0, 0, 0)], k=3)
    assert numbers.acceptance_length == pytest.approx(1.03)


def test_the_interval_is_wide_for_few_answers_and_narrows_with_more():
    """CASES D12."""
    varied = [counts(10 - i, i, 0, 0) for i in range(10)]
    few, many = acceptance(varied, 3), acceptance(varied * 30, 3)
    for numbers in (few, many):
        low, high = numbers.interval
        assert low < numbers.acceptance_length < high
    assert many.interval[1] - many.interval[0] < 0.3 * (few.interval[1] - few.interval[0])


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    import numpy as np

    rng = np.random.default_rng(7)
    covered = 0
    for trial in range(100):
        rates = rng.uniform(0.2, 0.8, size=40)  # prompts differ; the truth is 1.5
        hits = rng.binomial(20, rates)
        answers = [counts(20 - int(h), int(h), k=1) for h in hits]
        low, high = acceptance(answers, 1, seed=trial).interval
        covered += low <= 1.5 <= high
    assert 87 <= covered <= 100


def test_without_a_step_that_drafted_each_step_gave_one_token():
    numbers = acceptance([Counts(tokens=5)], k=2)
    assert numbers.acceptance_length == 1.0
    assert numbers.per_position == [0.0, 0.0]
    assert numbers.interval == (1.0, 1.0)


# prompts


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_prompts_and_chats_are_read_with_their_categories(tmp_path):
    file = write(
        tmp_path / "p.jsonl",
        {"prompt": "one?", "category": "maths", "answer": "1"},
        {"messages": [
            {"role": "system", "content": "be short"},
            {"role": "user", "content": "two?"},
            {"role": "assistant", "content": "2"},
        ]},
    )  # fmt: skip
    first, second = read_prompts(file)
    assert first.messages == ({"role": "user", "content": "one?"},)
    assert (first.category, second.category) == ("maths", "all")
    assert [m["role"] for m in second.messages] == ["system", "user"]
    assert len(read_prompts(file, limit=1)) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "no prompt"),
        ("{", "not JSON"),
        ('{"title": "x"}', "no known layout"),
        ('{"text": "x"}', "nothing is asked"),
        ('{"prompt": "  "}', "nothing is asked"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "nothing is asked"),
        ('{"prompt": "x", "category": 3}', "category should be a name"),
    ],
)
def test_a_file_that_can_not_be_used_is_refused_with_its_line(tmp_path, line, message):
    file = tmp_path / "p.jsonl"
    file.write_text(line)
    with pytest.raises(DataError, match=message) as caught:
        read_prompts(file)
    assert str(file) in caught.value.where


# the report


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    records = [
        {"prompt": f"question {i}", "category": "even" if i % 2 == 0 else "odd"} for i in range(4)
    ]
    return write(tmp_path_factory.mktemp("data") / "p.jsonl", *records)


@pytest.fixture
def params(tiny_verifier, tiny_speculator, data) -> EvaluateParams:
    return EvaluateParams(
        speculator=str(tiny_speculator),
        verifier=str(tiny_verifier),
        data=str(data),
        max_tokens=10,
        plain_samples=2,
    )


class Listener(Quiet):
    """Notes fractions; asks to stop after `limit` of them."""

    def __init__(self, limit: int | None = None) -> None:
        self.fractions: list[float | None] = []
        self.limit = limit

    def update(self, fraction, text, eta_s=None):
        self.fractions.append(fraction)

    def stopping(self):
        return self.limit is not None and len(self.fractions) > self.limit


def test_a_report_is_the_sum_of_its_answers_steps(params):
    listener = Listener()
    result = evaluate(params, listener)
    verifier = load_verifier(params.verifier)
    drafter = EagleDrafter(load_speculator(params.speculator), verifier)
    decoder = SpeculativeDecoder(verifier, drafter, 3)
    steps = [
        step
        for prompt in read_prompts(Path(params.data))
        for step in decoder.generate(
            chat_ids(verifier.tokenizer, prompt.messages), SamplingParams(max_tokens=10)
        )
    ]
    drafting = [step for step in steps if step.drafted]
    assert result.steps == len(drafting)
    assert result.tokens == sum(len(step.emitted) for step in steps)
    accepted = sum(step.accepted for step in drafting)
    assert result.acceptance_length == pytest.approx(1 + accepted / len(drafting))
    assert set(result.categories) == {"even", "odd"}
    assert sum(c.steps for c in result.categories.values()) == result.steps
    assert listener.fractions == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_a_report_says_under_which_conditions_it_holds(params):
    found = json.loads(evaluate(params).model_dump_json())
    assert found["tokens_per_second"] > 0 and found["tokens_per_second_plain"] > 0
    assert found["settings"] == {
        "speculative_tokens": 3,
        "temperature": 0.0,
        "draft_sampling": "argmax",
        "max_tokens": 10,
        "prompts": 4,
        "plain_prompts": 2,
        "engine": "reference",
        "engine_version": found["settings"]["engine_version"],
        "dtype": "float32",
        "template": "chat template of the verifier",
    }


def test_plain_speed_is_absent_when_it_was_not_asked_for(params):
    result = evaluate(params.model_copy(update={"plain_samples": 0, "samples": 1}))
    assert result.tokens_per_second_plain is None


def test_the_ngram_drafter_can_be_measured_too(params):
    result = evaluate(params.model_copy(update={"speculator": "ngram", "samples": 2}))
    assert result.tokens > 0


def test_an_evaluation_stops_between_prompts(params):
    with pytest.raises(Stopped, match="after 2 of 4"):
        evaluate(params, Listener(limit=2))


def test_a_draft_for_another_verifier_is_refused(params, tmp_path, tiny_verifier):
    config = tiny.draft_config(tiny_verifier, target_hidden_size=96)
    other = tiny.build_speculator(tmp_path / "d", tiny_verifier, config=config)
    with pytest.raises(PairingError):
        evaluate(params.model_copy(update={"speculator": str(other)}))


def test_an_unknown_engine_is_refused(params):
    with pytest.raises(InputError, match="`reference` or the URL"):
        evaluate(params.model_copy(update={"engine": "sglang"}))


# a server, played by a stand-in that answers as vLLM 0.32 words it

Serve = Callable[[dict[str, Any] | None], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a stand-in whose every answer carries the given speculation metrics."""
    servers = []

    def start(told: dict[str, Any] | None) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.reply({"data": [{"id": "stand-in"}], "version": "0.32.0"})

            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                self.reply(
                    {"usage": {"completion_tokens": 7}, "metrics": {"speculative_decoding": told}}
                )

            def reply(self, value):
                body = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/v1"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


TOLD = {
    "acceptance_histogram": [2, 1, 0, 0, 1, 0],
    "num_spec_steps": 4,
    "num_draft_tokens": 20,
    "num_spec_tokens": 5,
    "per_step_accepted": [0, 1, 4, 0],
}


def test_a_servers_own_counts_and_its_own_k_are_used(params, serve):
    result = evaluate(params.model_copy(update={"engine": serve(TOLD)}))
    assert result.acceptance_length == pytest.approx(1 + 5 / 4)
    assert result.acceptance_rate == pytest.approx(5 / 20)
    assert result.per_position == pytest.approx([0.5, 0.25, 0.25, 0.25, 0.0])
    assert result.settings.speculative_tokens == 5
    assert result.settings.engine_version == "0.32.0"


def test_a_server_that_drafts_although_asked_not_to_gives_no_plain_speed(params, serve):
    assert (
        evaluate(params.model_copy(update={"engine": serve(TOLD)})).tokens_per_second_plain is None
    )


@pytest.mark.parametrize("missing", ["acceptance_histogram", "per_step_accepted"])
def test_one_of_the_two_arrays_is_enough(params, serve, missing):
    told = {name: value for name, value in TOLD.items() if name != missing}
    assert evaluate(params.model_copy(update={"engine": serve(told)})).steps == 16


def test_an_answer_of_which_no_step_drafted_counts_its_tokens_only(params, serve):
    told = {"num_spec_steps": 0, "num_draft_tokens": 0, "num_spec_tokens": 3}
    result = evaluate(params.model_copy(update={"engine": serve(told)}))
    assert (result.steps, result.tokens) == (0, 28)


def test_a_server_that_tells_nothing_is_refused_with_the_flag_it_needs(params, serve):
    with pytest.raises(Unavailable, match="per-request-spec-decode-metrics detailed"):
        evaluate(params.model_copy(update={"engine": serve(None)}))


def test_a_server_that_is_not_there_is_said_to_be_unreachable(params):
    with pytest.raises(Unavailable, match="can't be reached"):
        evaluate(params.model_copy(update={"engine": "http://127.0.0.1:9"}))
