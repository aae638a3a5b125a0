"""A run that was stopped ends bit for bit like one that was not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from speculators_core.errors import CheckpointError, Conflict, Stopped
from speculators_core.params import TrainParams
from speculators_core.training.loop import Loop
from speculators_core.training.train import TrainResult, train
from tests import tiny
from tests.core.listening import Listener
from tests.core.small_data import prepare_chats

Train = Callable[..., TrainResult]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path) -> Path:
    return prepare_chats(tmp_path_factory.mktemp("data"), tiny_verifier)


@pytest.fixture
def run(data: Path, tiny_verifier: Path, tmp_path: Path) -> Train:
    def start(
        listener: Listener | None = None, output: str = "out", resume: Path | None = None, **changes
    ) -> TrainResult:
        values = {
            "data": str(data),
            "verifier": str(tiny_verifier),
            "aux_layers": tiny.AUX_LAYERS,
            "epochs": 2,
            "tokens_per_batch": 512,
            "evaluate_every": 0,
            "validate_every": 6,
            "save_every": 4,
        }
        params = TrainParams.model_validate({**values, **changes})
        return train(params, tmp_path / output, listener, resume)

    return start


def stop_after(checks: int) -> Listener:
    """Asks to stop at the n-th question of the training loop (one a batch, some before)."""
    return Listener(lambda me: me.asked > checks)


class Killed(Exception):
    pass


class Killer(Listener):
    """Ends the attempt without a word after step 7, one behind a checkpoint and a validation."""

    def update(self, fraction: float | None, text: str, eta_s: float | None = None) -> None:
        if text.startswith("step 7 "):
            raise Killed


def numbers(listener: Listener) -> dict[int, dict[str, float]]:
    """What was told of each step, but for clocks and memory, and for the means of training, which
    are over the steps since the last telling or the last start."""
    exact = ("lr", "grad_norm", "val_", "skipped", "quarantined")
    return {
        step: {n: v for n, v in told.items() if n.startswith(exact) and "per_second" not in n}
        for step, told in listener.steps.items()
    }


def weights(place: Path) -> dict[str, torch.Tensor]:
    return load_file(place / "model.safetensors")


def test_a_resumed_run_ends_bit_identical(run: Train, tmp_path: Path) -> None:
    """C5: validation losses, rates, gradient norms of every step, and weights."""
    whole = Listener()
    uninterrupted = run(whole, output="whole")
    heard = Listener()
    for checks in (3, 9):  # stopped twice, in both epochs
        resume = tmp_path / "out.checkpoints" if checks > 3 else None
        stopper = stop_after(checks)
        with pytest.raises(Stopped, match="it can resume"):
            run(stopper, resume=resume)
        heard.steps.update(stopper.steps)
    last = Listener()
    resumed = run(last, resume=tmp_path / "out.checkpoints")
    assert resumed.steps == uninterrupted.steps
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "out")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    ours = {k: v for k, v in resumed.best.items() if k != "tokens_per_second"}
    assert ours == {k: v for k, v in uninterrupted.best.items() if k != "tokens_per_second"}
    heard.steps.update(last.steps)
    assert numbers(heard) == numbers(whole)
    assert any("resumed at step" in note for note in last.notes)


def test_a_run_killed_between_checkpoints_redoes_the_steps_since(
    run: Train, tmp_path: Path
) -> None:
    run(output="whole")
    with pytest.raises(Killed):
        run(Killer())
    assert (tmp_path / "out.checkpoints" / "step-0000006").is_dir()
    run(resume=tmp_path)  # the directory it lies in is enough
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "out")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("output", ["out", "elsewhere"])
def test_the_best_weights_outlive_the_attempt_that_found_them(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    falling = {"served_acceptance_length": 3.0}  # the first validation, at step 6, is the best
    monkeypatch.setattr(
        Loop, "evaluate", lambda loop: {n: v - loop.position.step / 1e3 for n, v in falling.items()}
    )
    whole = run(output="whole")
    with pytest.raises(Killed):
        run(Killer())
    resumed = run(output=output, resume=tmp_path / "out.checkpoints")
    assert whole.best["step"] == resumed.best["step"] == 6
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / output)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_there_is_always_a_checkpoint_and_old_ones_go(run: Train, tmp_path: Path) -> None:
    """C4: a newer one is complete before an older one goes."""
    place = tmp_path / "out.checkpoints"
    seen: list[set[str]] = []

    class Watcher(Listener):
        def update(self, fraction: float | None, text: str, eta_s: float | None = None) -> None:
            if place.exists():
                seen.append({p.name for p in place.iterdir()})

    run(Watcher())
    after_first = [names for names in seen if any(n.startswith("step-") for n in names)]
    assert after_first and seen.index(after_first[0]) <= 4
    for names in seen[seen.index(after_first[0]) :]:
        assert sum(n.startswith("step-") for n in names) == 1
        assert sum(n.startswith("best-") for n in names) <= 1
        assert not any(n.endswith(".partial") for n in names)


def test_a_decided_schedule_is_kept_by_the_resumed_run(run: Train, tmp_path: Path) -> None:
    plan = {"epochs": 3000, "max_minutes": 1.0}
    listener = Listener(lambda me: any("shortened" in note for note in me.notes))
    with pytest.raises(Stopped) as stopped:
        run(listener, **plan)
    note = next(n for n in listener.notes if "shortened" in n)
    decided = f"of {note.split('shortened to ')[1].split()[0]};"
    assert decided in str(stopped.value)
    with pytest.raises(Stopped, match=decided):
        run(Listener(lambda me: True), **plan, resume=tmp_path / "out.checkpoints")


def test_another_runs_checkpoint_is_refused(run: Train, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        run(stop_after(5))
    with pytest.raises(CheckpointError, match="other parameters"):
        run(output="new", resume=tmp_path / "out.checkpoints", lr=5e-4)


def test_held_out_prompts_are_known_by_what_they_ask_and_not_by_their_place(
    run: Train, tmp_path: Path
) -> None:
    """B15: what picks the best weights may not change on the way."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one two three"}\n')
    measured = {"evaluate_every": 1000, "held_out": str(prompts)}
    with pytest.raises(Stopped):
        run(stop_after(5), **measured)
    other = prompts.rename(tmp_path / "elsewhere.jsonl")
    measured["held_out"] = str(other)
    with pytest.raises(Stopped):
        run(stop_after(1), **measured, resume=tmp_path / "out.checkpoints")
    other.write_text('{"prompt": "four five six"}\n')
    with pytest.raises(CheckpointError, match="other parameters"):
        run(**measured, resume=tmp_path / "out.checkpoints")


def test_a_damaged_checkpoint_is_named(run: Train, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        run(stop_after(5))
    (place,) = (tmp_path / "out.checkpoints").glob("step-*")
    (place / "weights.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="can't be read"):
        run(resume=tmp_path / "out.checkpoints")


def test_checkpoints_are_not_overwritten_by_a_fresh_start(run: Train, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        run(stop_after(5))
    with pytest.raises(Conflict, match="earlier attempt"):
        run()
    assert list((tmp_path / "out.checkpoints").glob("step-*"))


def test_resuming_where_nothing_was_saved_starts_from_the_beginning(
    run: Train, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    run(output="whole")
    run(resume=empty)
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "out")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
