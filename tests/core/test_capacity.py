"""What training and preparing will take is known, in words and numbers, before they start."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from speculators_core.data import capacity
from speculators_core.data.capacity import Estimate, Speed, in_words, of_preparing, of_training
from speculators_core.errors import Unavailable
from speculators_core.models.verifier_config import VerifierFacts, read_verifier
from speculators_core.params import TrainParams
from tests import tiny
from tests.core.small_data import prepare_chats


@pytest.fixture
def facts(tiny_verifier) -> VerifierFacts:
    return read_verifier(tiny_verifier)


def params(**changes) -> TrainParams:
    return TrainParams(**{"data": "d", "verifier": "v", **changes})


def estimate(facts: VerifierFacts, tokens: int = 1000, **changes) -> Estimate:
    return of_training(params(**changes), tokens, facts, tiny.DRAFT_VOCAB, "/tmp")


def test_states_are_tokens_times_states_times_width_times_bytes(facts) -> None:
    """B12: 268 MB for one sample of Llama-3.1-8B, as others state it."""
    assert capacity.states_bytes(8192, 3, 4096, 2) == 8192 * 4 * 4096 * 2
    assert estimate(facts).needs[0].size == 1000 * 4 * tiny.HIDDEN * 4
    assert estimate(facts, aux_layers=(1, 2)).needs[0].size == 1000 * 3 * tiny.HIDDEN * 4


@pytest.mark.parametrize(
    ("changes", "itemsize"),
    [({}, 4), ({"dtype": "bfloat16"}, 2), ({"states_dtype": "float16"}, 2)],
)
def test_the_precision_that_is_kept_decides(facts, changes, itemsize) -> None:
    assert estimate(facts, **changes).needs[0].size == 1000 * 4 * tiny.HIDDEN * itemsize


def test_states_that_are_not_kept_take_nothing(facts) -> None:
    found = estimate(facts, hidden_states="online")
    assert [need.what for need in found.needs] == ["checkpoints"]
    with pytest.raises(ValueError, match="online keeps none"):
        params(hidden_states="online", states_dtype="float16")


def test_more_than_is_free_is_refused_with_the_numbers(facts, monkeypatch) -> None:
    """B12"""
    monkeypatch.setattr(capacity.shutil, "disk_usage", lambda place: SimpleNamespace(free=10**6))
    found = estimate(facts, tokens=10_000)
    assert not found.fits
    assert any("1.0 MB are free: too little" in line for line in found.lines())
    with pytest.raises(Unavailable, match=r"hidden states need 10\.2 MB \(10000 tokens x 4 states"):
        found.require()


def test_what_fits_is_let_through(facts, tmp_path) -> None:
    estimate(facts).require()
    of_preparing([], tmp_path / "not" / "there" / "yet").require()


def test_a_time_is_named_only_with_the_speed_it_comes_from(facts) -> None:
    assert estimate(facts).seconds is None
    timed = of_training(
        params(epochs=3),
        1000,
        facts,
        tiny.DRAFT_VOCAB,
        "/tmp",
        states_speed=Speed(tokens_per_second=100, source="a probe of 20 s"),
        training_speed=Speed(tokens_per_second=50, source="run abc"),
    )
    assert timed.seconds == pytest.approx(10 + 60)
    assert any("a probe of 20 s" in line for line in timed.lines())
    assert any("3000 tokens at 50 tokens/s, run abc" in line for line in timed.lines())


def test_preparing_is_estimated_from_the_text(tmp_path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text("x" * 3000)
    assert of_preparing([file, tmp_path / "missing"], tmp_path).size == 1000 * 5


def test_preparing_is_refused_before_it_starts(tmp_path, tiny_verifier, monkeypatch) -> None:
    monkeypatch.setattr(capacity.shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
    with pytest.raises(Unavailable, match=r"prepared tokens need .* 1\.0 kB are free"):
        prepare_chats(tmp_path, tiny_verifier)
    assert [path.name for path in tmp_path.iterdir()] == ["chats.jsonl"]


@pytest.mark.parametrize(
    ("size", "words"),
    [(10, "10 bytes"), (1500, "1.5 kB"), (268e6, "268.0 MB"), (12e12, "12.00 TB")],
)
def test_sizes_are_said_in_words(size, words) -> None:
    assert in_words(size) == words
