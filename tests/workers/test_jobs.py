"""The job kinds with tiny models: what each makes, records and registers."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from app.services import claims, data_sets, evaluations, runs, speculators, verifiers
from speculators_core.errors import Forbidden, InputError, NotFound, Stopped
from speculators_core.params import JobKind
from tests import tiny
from tests.core.stand_in_endpoint import stand_in_endpoint
from tests.workers.lab import wait_for
from workers import job, leases, outcome
from workers.jobs import job_of
from workers.reporter import Reporter

CHAT = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2, clearly."}]


@pytest.fixture
def verifier(home):
    """A tiny verifier, registered as `tiny` by its own job."""
    leases.host_slots.cache_clear()
    leases.register()
    path = tiny.build_verifier(home / "models" / "tiny")
    _do("verifier", {"source": str(path), "name": "tiny"})
    return path


class Listener(Reporter):
    """A reporter that keeps its notes, and asks to stop after so many logged steps."""

    def __init__(self, run_id: str, stop_after: int | None = None) -> None:
        super().__init__(run_id, every_s=0.05)
        self.notes: list[str] = []
        self._left = stop_after

    def note(self, text: str) -> None:
        self.notes.append(text)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        super().metrics(step, values)
        if self._left is not None:
            self._left -= 1
            if self._left <= 0:
                self.stop()


def _begin(kind: str, params: dict, **options):
    run = runs.submit(kind, params, owner="ada", **options)
    assert claims.claim("here").run_id == run.id
    return runs.get(run.id)


def _attempt(run, stop_after: int | None = None) -> tuple[dict, Listener]:
    params = job.resolved(run.kind, run.params)
    with Listener(run.id, stop_after) as listener:
        result = job_of(JobKind(run.kind))(run, params, listener)
    json.dumps(result)
    return result, listener


def _do(kind: str, params: dict, **options) -> tuple[str, dict]:
    """A run that succeeds; its id and result."""
    run = _begin(kind, params, **options)
    result, _ = _attempt(run)
    claims.set_result(run.id, result)
    claims.finish(run.id, "succeeded")
    return run.id, result


def _chats(home: Path, count: int = 24) -> Path:
    file = home / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": CHAT}) + "\n" for _ in range(count)))
    return file


def _prepare(file: Path, **options) -> tuple[str, dict]:
    params = {"data": [str(file)], "verifier": "tiny", "draft_vocab_size": 64}
    return _do("prepare", {**params, "seq_length": 64, "validation_fraction": 0.2}, **options)


def test_a_verifier_is_registered_where_it_lies(verifier):
    known = verifiers.get("tiny")
    assert (known.path, known.vocab_size) == (str(verifier), tiny.VOCAB)


def test_a_source_that_is_nothing_is_refused_in_words(home):
    leases.host_slots.cache_clear()
    leases.register()
    for source in ("/no/such/model", "wheel:other", "plainword"):
        run = _begin("verifier", {"source": source, "name": "x"})
        with pytest.raises((InputError, NotFound)):
            _attempt(run)
        claims.finish(run.id, "failed")


def test_prepared_data_lie_under_a_key_of_their_content(verifier, home):
    first = _prepare(_chats(home))[1]
    copy = home / "elsewhere.jsonl"
    copy.write_bytes((home / "chats.jsonl").read_bytes())
    assert _prepare(copy)[1]["output"] == first["output"]
    copy.write_bytes(_chats(home, 25).read_bytes())
    assert _prepare(copy, name="edited")[1]["output"] != first["output"]
    assert {row.kind for row in data_sets.list_data_sets()} == {"prepared"}


def test_a_stopped_training_goes_on_from_its_checkpoint_and_registers_a_speculator(verifier, home):
    prepared, _ = _prepare(_chats(home))
    params = {
        "data": f"run:{prepared}",
        "verifier": "tiny",
        "epochs": 4,
        "tokens_per_batch": 64,
        "save_every": 2,
        "validate_every": 4,
        "ttt_steps": 2,
    }
    run = _begin("train", params, name="my draft")
    with pytest.raises(Stopped):
        _attempt(run, stop_after=3)
    result, listener = _attempt(run)
    assert any("resumed at step" in note for note in listener.notes)
    known = speculators.get("my-draft")
    assert (known.path, known.verifier, known.run_id) == (result["output"], "tiny", run.id)
    assert Path(result["output"]).parent == home / "speculators"
    steps = [m.step for m in runs.metrics(run.id)]
    assert len(steps) == len(set(steps))
    again, _ = _attempt(run)
    assert again == result, "an attempt that had finished is not repeated"
    assert [row.name for row in speculators.list_speculators()] == ["my-draft"]


def test_term_at_a_training_saves_it_and_the_next_attempt_goes_on_there(verifier, home):
    """F8"""
    prepared, _ = _prepare(_chats(home))
    params = {
        "data": f"run:{prepared}",
        "verifier": "tiny",
        "epochs": 40,
        "tokens_per_batch": 64,
        "save_every": 100_000,
        "ttt_steps": 2,
    }
    run = _begin("train", params)
    process = subprocess.Popen(
        [sys.executable, "-m", "workers.job", run.id], stdout=subprocess.PIPE, text=True
    )
    wait_for(lambda: runs.metrics(run.id), 120, "the first steps")
    process.send_signal(signal.SIGTERM)
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == outcome.STOPPED, printed
    reached = runs.metrics(run.id)[-1].step
    _, listener = _attempt(run)
    [resumed] = [note for note in listener.notes if "resumed at step" in note]
    assert int(re.search(r"resumed at step (\d+)", resumed)[1]) >= reached > 0


def test_a_conversion_is_registered_with_its_doubts(verifier, home):
    source = tiny.build_research(home / "models" / "research-draft", verifier)
    run_id, result = _do(
        "convert",
        {"checkpoint": str(source), "verifier": "tiny", "aux_layers": list(tiny.AUX_LAYERS)},
    )
    known = speculators.get("research-draft")
    assert (known.path, known.verifier, known.run_id) == (result["output"], "tiny", run_id)
    assert known.deployable is result["deployable"]
    assert known.doubts == result["doubts"]


def test_an_evaluation_is_kept_under_the_names_that_people_know(verifier, home):
    made = tiny.build_speculator(home / "models" / "draft", verifier)
    speculators.register(made, "draft", verifier="tiny")
    prompts = home / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}+{i}?"}) + "\n" for i in range(3)))
    run_id, result = _do(
        "evaluate",
        {
            "speculator": "draft",
            "verifier": "tiny",
            "data": str(prompts),
            "max_tokens": 8,
            "plain_samples": 1,
        },
    )
    kept = evaluations.get(result["evaluation_id"])
    assert (kept.speculator, kept.verifier, kept.run_id) == ("draft", "tiny", run_id)
    assert kept.acceptance_length == result["acceptance_length"]


def test_self_written_chats_and_held_out_prompts_become_two_data_sets(verifier, monkeypatch):
    """With a stand-in for the core's writer: a random model writes no usable questions."""
    from speculators_core.data.self_write import SelfWriteResult
    from workers.jobs import self_write as self_write_job

    def writer(params, output, progress):
        output.mkdir(parents=True)
        (output / "chats.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
        (output / "held_out.jsonl").write_text(json.dumps({"prompt": "2+2?"}) + "\n")
        files = {"output": output / "chats.jsonl", "held_out": output / "held_out.jsonl"}
        return SelfWriteResult(**{k: str(v) for k, v in files.items()}, samples=1, tokens=7)

    monkeypatch.setattr(self_write_job, "self_write", writer)
    run_id, result = _do("self_write", {"verifier": "tiny", "samples": 1, "held_out": 1})
    found = {row.name: row for row in data_sets.list_data_sets()}
    assert set(found) == {"self-written-maths", "self-written-maths-held-out"}
    chats, prompts = found["self-written-maths"], found["self-written-maths-held-out"]
    assert (chats.kind, chats.samples, chats.path) == ("chats", 1, result["output"])
    assert (prompts.kind, prompts.samples, prompts.path) == ("prompts", 1, result["held_out"])
    facts = {"verifier": "tiny", "domain": "maths", "seed": 0, "tokens": 7, "dropped": {}}
    assert chats.facts == facts
    assert chats.run_id == run_id


def test_a_run_asks_no_server_but_this_labs_deployments_and_the_operators(verifier, home):
    with stand_in_endpoint() as server:
        params = {"data": str(_chats(home, 3)), "verifier": "tiny", "endpoint": server.url}
        with pytest.raises(Forbidden, match="no deployment that runs"):
            _do("regenerate", params)
    assert not server.bodies


def test_regenerated_answers_become_a_data_set_with_their_sampling_settings(
    verifier, home, monkeypatch
):
    with stand_in_endpoint() as server:
        monkeypatch.setenv("SPECLAB_ENDPOINT_URL", server.url)
        params = {"data": str(_chats(home, 3)), "verifier": "tiny", "endpoint": server.url}
        run_id, result = _do("regenerate", {**params, "max_tokens": 9, "temperature": 0.5})
    known = data_sets.get("chats-regenerated")
    assert (known.kind, known.samples, known.path) == ("chats", 3, result["output"])
    assert known.run_id == run_id
    facts = {"verifier": "tiny", "of": "chats", "model": "stand-in", "max_tokens": 9}
    assert facts.items() <= known.facts.items() and known.facts["temperature"] == 0.5
    assert _prepare(Path(known.path))[1]["samples"] == 3


def test_an_attempt_to_regenerate_goes_on_where_the_last_one_was_stopped(
    verifier, home, monkeypatch
):
    with stand_in_endpoint() as server:
        monkeypatch.setenv("SPECLAB_ENDPOINT_URL", server.url)
        params = {"data": str(_chats(home, 6)), "verifier": "tiny", "endpoint": server.url}
        run = _begin("regenerate", {**params, "concurrency": 1})
        with pytest.raises(Stopped), Listener(run.id) as listener:
            listener.stopping = lambda: len(server.bodies) > 2
            job_of(JobKind("regenerate"))(run, job.resolved(run.kind, run.params), listener)
        asked = len(server.bodies)
        result, _ = _attempt(run)
    assert result["samples"] == 6 and len(server.bodies) - asked < 6
