"""Best by what the reference engine accepts, early ends, and where metrics go."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from speculators_core.checkpoint import load_speculator
from speculators_core.data.prepare import load_prepared
from speculators_core.decode.engine import SpeculativeDecoder, Step
from speculators_core.errors import Stopped, Unavailable
from speculators_core.evaluate.evaluate import evaluate
from speculators_core.models.verifier import load_verifier
from speculators_core.params import EvaluateParams, TrainParams
from speculators_core.training.judging import Measurement, openings
from speculators_core.training.loop import Loop
from speculators_core.training.train import TrainResult, train
from speculators_core.training.world import World
from tests import tiny
from tests.core.listening import Listener
from tests.core.small_data import prepare_chats

Train = Callable[..., TrainResult]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path) -> Path:
    return prepare_chats(tmp_path_factory.mktemp("data"), tiny_verifier)


@pytest.fixture
def run(data: Path, tiny_verifier: Path, tmp_path: Path) -> Train:
    def start(listener: Listener | None = None, output: str = "out", **changes) -> TrainResult:
        values = {
            "data": str(data),
            "verifier": str(tiny_verifier),
            "aux_layers": tiny.AUX_LAYERS,
            "epochs": 1,
            "tokens_per_batch": 512,
            "validate_every": 4,
            "save_every": 4,
            "evaluate_every": 4,
            "evaluate_prompts": 2,
            "evaluate_tokens": 12,
        }
        params = TrainParams.model_validate({**values, **changes})
        return train(params, tmp_path / output, listener)

    return start


def test_acceptance_is_measured_on_held_out_prompts_and_picks_the_best(
    run: Train, data: Path, tiny_verifier: Path, tmp_path: Path
) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "say abc"}\n{"prompt": "say fgh"}\n')
    listener = Listener()
    result = run(listener, held_out=str(held_out), dtype="float32")
    logged = listener.steps[4]
    assert {"measured_acceptance_length", "val_served_acceptance_length"} <= logged.keys()
    shares = [logged[f"measured_acceptance_{k}"] for k in range(3)]
    assert logged["measured_acceptance_length"] == pytest.approx(1 + sum(shares))
    told = evaluate(
        EvaluateParams(
            speculator=str(tmp_path / "out"),
            verifier=str(tiny_verifier),
            data=str(held_out),
            max_tokens=12,
            plain_samples=0,
        )
    )
    assert result.best["measured_acceptance_length"] == told.acceptance_length


def test_without_prompts_of_ones_own_the_openings_of_validation_chats_are_asked(data: Path) -> None:
    prepared = load_prepared(data)
    documents = prepared.validation.nonzero().flatten().tolist()
    tokenizer = tiny.byte_tokenizer()
    texts = [tokenizer.decode(prompt) for prompt in openings(prepared, documents)]
    assert len(texts) == len(documents)
    assert all(text.endswith("<|im_start|>assistant\n") for text in texts)


def test_training_ends_early_where_nothing_gets_better(
    run: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second measurement is the best; two worse ones later it is over."""
    given = iter([1.5, 2.0, 1.9, 1.8, 1.7, 1.6])
    monkeypatch.setattr(Loop, "measure", lambda loop: {"measured_acceptance_length": next(given)})
    listener = Listener()
    result = run(listener, epochs=10, patience=2, evaluate_every=2)
    assert (result.steps, result.best["step"]) == (8, 4)
    assert any("ended early at step 8" in note for note in listener.notes)


def test_a_measurement_stops_when_asked(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Measurement.of
    monkeypatch.setattr(
        Measurement, "of", lambda self, draft, world, _: original(self, draft, world, lambda: True)
    )
    with pytest.raises(Stopped, match="measured"):
        run()
    assert list((tmp_path / "out.checkpoints").glob("step-0000004"))


@dataclass(frozen=True)
class OneOfTwo(World):
    """A stand-in for the second of two processes: writes down when it waits for the other."""

    rank: int = 1
    size: int = 2
    did: list[str] = field(default_factory=list)

    def sum(self, values: Tensor) -> Tensor:
        self.did.append("wait")
        return values

    def heard(self, value: int) -> int:
        return value


def test_processes_that_measure_wait_for_each_other_after_every_prompt(
    tiny_verifier: Path, tiny_speculator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C9: however many prompts there are, none waits longer for another than an answer takes."""
    world, verifier = OneOfTwo(), load_verifier(tiny_verifier)
    original = SpeculativeDecoder.generate

    def answered(self: SpeculativeDecoder, *asked: Any) -> Generator[Step, None, None]:
        world.did.append("answer")
        return original(self, *asked)

    monkeypatch.setattr(SpeculativeDecoder, "generate", answered)
    measurement = Measurement(verifier, [[1, 2, 3]] * 5, speculative_tokens=3, max_tokens=4)
    measurement.of(load_speculator(tiny_speculator), world, lambda: False)
    assert world.did == ["answer", "wait", "answer", "wait", "wait"]


class StandInTracker(ModuleType):
    """Stands in for trackio: remembers what it is told."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.__spec__ = __import__("importlib.machinery").machinery.ModuleSpec("trackio", None)
        self.told: list[object] = []

    def init(self, project: str, name: str, config: dict[str, object]) -> None:
        self.told.append((project, name, config["loss"]))

    def log(self, values: dict[str, float], step: int) -> None:
        self.told.append((step, "loss" in values))

    def finish(self) -> None:
        self.told.append("finished")


def test_metrics_go_to_a_sink_as_well(run: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = StandInTracker()
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    listener = Listener()
    run(listener, sinks=("trackio",), evaluate_every=100)
    assert tracker.told[0] == ("speclab", "out", "kl")
    assert tracker.told[-1] == "finished"
    assert (5, True) in tracker.told and "loss" in listener.steps[5]
    assert {"memory_mb", "seconds_left", "skipped", "tokens_per_second"} <= listener.steps[5].keys()
    assert listener.steps[5]["memory_mb"] > 10


def test_a_sink_that_is_not_installed_is_said_before_anything_starts(
    run: Train, tmp_path: Path
) -> None:
    listener = Listener()
    with pytest.raises(Unavailable, match="wandb is asked for"):
        run(listener, sinks=("wandb",))
    assert not listener.notes and not list(tmp_path.iterdir())
