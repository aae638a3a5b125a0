"""`kill -9` of a training at random moments: resumed, it ends bit-identical all the same.

The moment is an event of the run (whatever it tells or asks) and some milliseconds more, so how
fast the machine is decides nothing.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from speculators_core.params import TrainParams
from speculators_core.progress import Quiet
from speculators_core.training.train import train
from tests import tiny
from tests.core.proofs import record
from tests.core.small_data import prepare_chats

ROUNDS = 20
SAMPLE = 2
LATER_S = 0.02  # at most, from the event to the kill
NEVER = 1 << 31


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path) -> Path:
    return prepare_chats(tmp_path_factory.mktemp("data"), tiny_verifier, count=24)


class Fuse(Quiet):
    """Kills its process some time after the n-th event, and writes down how many there were."""

    def __init__(self, event: int, later_s: float, count: Path) -> None:
        self._event, self._later_s, self._count, self._seen = event, later_s, count, 0

    def _happened(self) -> None:
        if self._seen == self._event:
            threading.Timer(self._later_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        self._seen += 1
        self._count.write_text(str(self._seen))

    def update(self, fraction: float | None, text: str, eta_s: float | None = None) -> None:
        self._happened()

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self._happened()

    def note(self, text: str) -> None:
        self._happened()

    def stopping(self) -> bool:
        self._happened()
        return False


def started(
    data: Path, verifier: Path, output: Path, event: int = NEVER, later_s: float = 0.0
) -> BaseProcess:
    """A training in a process of its own, going on from whatever is there."""
    params = TrainParams.model_validate(
        {
            "data": str(data),
            "verifier": str(verifier),
            "aux_layers": tiny.AUX_LAYERS,
            "epochs": 1,
            "tokens_per_batch": 256,
            "validate_every": 3,
            "save_every": 2,
            "evaluate_every": 4,
            "evaluate_prompts": 1,
            "evaluate_tokens": 8,
        }
    )
    output.parent.mkdir(exist_ok=True)

    def work() -> None:
        torch.set_num_threads(1)  # a forked process has no pool of threads
        fuse = Fuse(event, later_s, output.parent / "events")
        train(params, output, fuse, resume=output.parent)
        os._exit(0)  # a fuse that still burns has come too late

    process = get_context("fork").Process(target=work)
    process.start()
    return process


def finished(data: Path, verifier: Path, output: Path) -> dict[str, torch.Tensor]:
    process = started(data, verifier, output)
    process.join(300)
    assert process.exitcode == 0
    return load_file(output / "model.safetensors")


def kill_and_resume(rounds: int, data: Path, verifier: Path, folder: Path) -> int:
    """How many of the rounds were interrupted."""
    expected = finished(data, verifier, folder / "whole" / "out")
    finished(data, verifier, folder / "counted" / "out")  # with cached states, as all that follow
    events = int((folder / "counted" / "events").read_text())
    rng, interrupted = random.Random(5), 0
    for number in range(rounds):
        output = folder / f"round-{number}" / "out"
        process = started(data, verifier, output, rng.randrange(events), rng.uniform(0, LATER_S))
        process.join(300)
        assert process.exitcode in (0, -signal.SIGKILL)
        interrupted += process.exitcode != 0
        if output.exists():  # it was over before
            found = load_file(output / "model.safetensors")
        else:
            found = finished(data, verifier, output)
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), f"round {number}: {name}"
    assert 2 * interrupted >= rounds
    return interrupted


def test_a_killed_training_ends_bit_identical(
    data: Path, tiny_verifier: Path, tmp_path: Path
) -> None:
    kill_and_resume(SAMPLE, data, tiny_verifier, tmp_path)


@pytest.mark.prove
def test_twenty_killed_trainings_end_bit_identical(
    data: Path, tiny_verifier: Path, tmp_path: Path
) -> None:
    began = time.monotonic()
    interrupted = kill_and_resume(ROUNDS, data, tiny_verifier, tmp_path)
    seconds = round(time.monotonic() - began)
    record("training_kills", {"rounds": ROUNDS, "interrupted": interrupted, "seconds": seconds})
