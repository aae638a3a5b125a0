"""`kill -9` of a training at random moments: resumed, it ends bit-identical all the same."""

from __future__ import annotations

import os
import random
import signal
import time
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from speculators_core.params import TrainParams
from speculators_core.training.train import train
from tests import tiny
from tests.core.small_data import prepare_chats

ROUNDS = 20
SAMPLE = 2


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path) -> Path:
    return prepare_chats(tmp_path_factory.mktemp("data"), tiny_verifier, count=24)


def started(data: Path, verifier: Path, output: Path) -> BaseProcess:
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

    def work() -> None:
        torch.set_num_threads(1)  # a forked process has no pool of threads
        train(params, output, resume=output.parent)

    process = get_context("fork").Process(target=work)
    process.start()
    return process


def finished(data: Path, verifier: Path, output: Path) -> dict[str, torch.Tensor]:
    process = started(data, verifier, output)
    process.join(300)
    assert process.exitcode == 0
    return load_file(output / "model.safetensors")


def kill_and_resume(rounds: int, data: Path, verifier: Path, folder: Path) -> None:
    expected = finished(data, verifier, folder / "whole" / "out")
    began = time.monotonic()
    finished(data, verifier, folder / "timed" / "out")  # with cached states, as all that follow
    lasts = time.monotonic() - began
    rng, interrupted = random.Random(5), 0
    for number in range(rounds):
        output = folder / f"round-{number}" / "out"
        process = started(data, verifier, output)
        time.sleep(rng.uniform(0.1, 0.7) * lasts)
        assert process.pid
        os.kill(process.pid, signal.SIGKILL)
        process.join(30)
        interrupted += process.exitcode == -signal.SIGKILL
        if output.exists():  # it was faster than the timed one
            found = load_file(output / "model.safetensors")
        else:
            found = finished(data, verifier, output)
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), f"round {number}: {name}"
    assert 2 * interrupted >= rounds


def test_a_killed_training_ends_bit_identical(
    data: Path, tiny_verifier: Path, tmp_path: Path
) -> None:
    kill_and_resume(SAMPLE, data, tiny_verifier, tmp_path)


@pytest.mark.prove
def test_twenty_killed_trainings_end_bit_identical(
    data: Path, tiny_verifier: Path, tmp_path: Path
) -> None:
    kill_and_resume(ROUNDS, data, tiny_verifier, tmp_path)
