"""Training: learns, freezes what it says, reports honestly, ends in time, fails clearly."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers.modeling_outputs import CausalLMOutputWithPast

from speculators_core.checkpoint import load_speculator
from speculators_core.data.prepare import Prepared, load_prepared
from speculators_core.data.states import InProcess, States, Tokens
from speculators_core.errors import (
    CheckpointError,
    Conflict,
    DataError,
    InputError,
    PairingError,
    SpeclabError,
    Stopped,
)
from speculators_core.models.verifier import load_verifier
from speculators_core.params import TrainParams
from speculators_core.training import train as train_module
from speculators_core.training.loop import Loop
from speculators_core.training.packing import batches, epoch_order
from speculators_core.training.schedule import Schedule
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
            "epochs": 3,
            "tokens_per_batch": 512,
            "evaluate_every": 0,
            "validate_every": 10,
            "save_every": 10,
        }
        params = TrainParams.model_validate({**values, **changes})
        return train(params, tmp_path / output, listener, resume)

    return start


def test_a_speculator_is_written_that_can_be_loaded(
    run: Train, tmp_path: Path, data: Path, tiny_verifier: Path
) -> None:
    listener = Listener()
    result = run(listener)
    draft = load_speculator(tmp_path / "out")
    assert draft.config.eagle_aux_hidden_state_layer_ids == list(tiny.AUX_LAYERS)
    assert draft.config.speculative_tokens == 3
    assert torch.equal(draft.t2d, load_prepared(data).kept)
    assert result.steps > 0 and result.best["acceptance_length"] >= 1
    card = (tmp_path / "out" / "README.md").read_text()
    assert "- Coverage: 100.00% of the answers' tokens" in card  # all letters are in 64 tokens
    assert (tmp_path / "out" / "training_report.json").exists()
    assert not list(tmp_path.glob("*.checkpoints"))
    assert listener.fractions == sorted(listener.fractions) and listener.fractions[-1] == 1.0


def test_a_verifier_that_is_named_by_a_path_is_warned_of_and_never_names_the_users_home(
    run: Train, tmp_path: Path, tiny_verifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A22: as in a conversion."""

    def named(output: str) -> str:
        return load_speculator(tmp_path / output).config.speculators_config.verifier.name_or_path

    home = tiny_verifier.parent
    monkeypatch.setenv("HOME", str(home))
    listener = Listener()
    run(listener, output="by_path", epochs=1)
    (warning,) = (note for note in listener.notes if "path of this machine" in note)
    assert "--verifier-name ORG/NAME" in warning
    assert named("by_path") == f"~/{tiny_verifier.name}"
    assert str(home) not in (tmp_path / "by_path" / "config.json").read_text()
    listener = Listener()
    run(listener, output="by_id", epochs=1, verifier_name="org/tiny")
    assert named("by_id") == "org/tiny"
    assert not any("path of this machine" in note for note in listener.notes)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_loss_is_finite_and_falls(run: Train, layers: int) -> None:
    """C6: with one layer, two and three."""
    listener = Listener()
    run(listener, num_layers=layers, lr=3e-3, epochs=2)
    losses = [v["loss"] for v in listener.steps.values() if "loss" in v]
    assert all(torch.isfinite(torch.tensor(losses)))
    assert losses[-1] < 0.9 * losses[0]


def test_metrics_have_the_agreed_names(run: Train) -> None:
    listener = Listener()
    run(listener)
    shared = {"loss", "acceptance_length", "coverage"}
    shared |= {f"{name}_{k}" for name in ("loss", "acceptance") for k in range(3)}
    trained = listener.steps[5]
    assert shared | {"grad_norm", "lr", "tokens_per_second"} <= trained.keys()
    assert {f"val_{name}" for name in shared} <= listener.steps[10].keys()
    total = sum(trained[f"acceptance_{k}"] for k in range(3))
    assert trained["acceptance_length"] == pytest.approx(1 + total)


def test_a_verifier_that_scales_its_logits_is_refused(tiny_verifier: Path) -> None:
    verifier = load_verifier(tiny_verifier)
    verifier.check_head()

    def scaled(_model: object, _given: object, out: CausalLMOutputWithPast) -> None:
        out.logits = out.logits / 4

    verifier.model.register_forward_hook(scaled)
    with pytest.raises(PairingError, match="does something to its logits"):
        verifier.check_head()


def test_frozen_tensors_are_bit_equal_and_the_log_lists_them(
    run: Train, tmp_path: Path, tiny_verifier: Path
) -> None:
    """C8"""
    listener = Listener()
    run(listener)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["embed_tokens.weight"], tiny.embedding_of(tiny_verifier))
    assert any(note == "frozen: embed_tokens.weight" for note in listener.notes)
    trainable = next(note for note in listener.notes if note.startswith("trainable"))
    assert "lm_head.weight" in trainable and "fc.weight" in trainable
    assert any("float32" in note and "device cpu" in note for note in listener.notes)


JUDGED = ("val_", "measured_")
CLOCKS = ("tokens_per_second", "memory_mb", "seconds_left")


@pytest.mark.parametrize(
    "judging",
    [
        {"validate_every": 3},
        {"evaluate_every": 3, "evaluate_prompts": 1, "evaluate_tokens": 8},
    ],
    ids=["validated", "measured"],
)
def test_training_is_the_same_whether_or_not_it_is_judged_on_the_way(
    run: Train, tmp_path: Path, judging: dict[str, int]
) -> None:
    """C2: what a validation or a measurement counts is not training's."""
    never, often = Listener(), Listener()
    run(never, output="never", validate_every=1000, epochs=1)
    run(often, output="often", **{"validate_every": 1000, **judging}, epochs=1)
    assert any(name.startswith(JUDGED) for name in often.steps[3])

    def trained(listener: Listener) -> dict[int, dict[str, float]]:
        kept = {
            step: {n: v for n, v in values.items() if not n.startswith(JUDGED) and n not in CLOCKS}
            for step, values in listener.steps.items()
        }
        return {step: values for step, values in kept.items() if values}

    assert trained(never) == trained(often) and "loss" in trained(never)[5]
    one, other = (load_file(tmp_path / n / "model.safetensors") for n in ("never", "often"))
    assert never.steps.keys() <= often.steps.keys() and one.keys() == other.keys()


def test_judgements_are_told_while_training_goes_on(run: Train) -> None:
    """C14: a curve to watch, not a table at the end."""
    order: list[str] = []

    class Watcher(Listener):
        def metrics(self, step: int, values: dict[str, float]) -> None:
            order.append("judged" if "val_loss" in values else "trained")

    run(Watcher(), validate_every=3)
    first = order.index("judged")
    assert order.count("judged") >= 3 and "trained" in order[first:]


def test_states_computed_on_the_way_train_the_same(run: Train, tmp_path: Path) -> None:
    run(output="cached", epochs=1)
    run(output="online", hidden_states="online", epochs=1)
    cached, online = (
        load_file(tmp_path / name / "model.safetensors") for name in ("cached", "online")
    )
    for name, tensor in cached.items():
        torch.testing.assert_close(tensor, online[name], atol=2e-3, rtol=1e-2, msg=name)


def spoil(monkeypatch: pytest.MonkeyPatch, data: Path, *documents: int) -> None:
    """The verifier gives NaN for these documents."""
    prepared = load_prepared(data)
    bad = {tuple(prepared.document(number)[0].tolist()) for number in documents}
    original = InProcess.states

    def states(self: InProcess, asked: Sequence[Tokens], *more: object) -> list[States]:
        found = original(self, asked, *more)
        for (ids, _), one in zip(asked, found, strict=True):
            if tuple(ids.tolist()) in bad:
                one.final[0, 0] = float("nan")
        return found

    monkeypatch.setattr(InProcess, "states", states)


def kept_for(data: Path, *, validation: bool) -> list[int]:
    return (load_prepared(data).validation == validation).nonzero().flatten().tolist()


@pytest.mark.parametrize("hidden_states", ["online", "cached"])
def test_a_chat_whose_states_are_no_numbers_is_set_aside_and_counted(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Path, hidden_states: str
) -> None:
    """B7: wherever the states come from."""
    copied = shutil.copytree(data, tmp_path / "data")
    spoil(monkeypatch, data, kept_for(data, validation=False)[0])
    listener = Listener()
    result = run(listener, data=str(copied), epochs=2, hidden_states=hidden_states)
    assert result.quarantined == 1
    assert [v["quarantined"] for v in listener.steps.values() if "quarantined" in v][-1] == 1
    assert sum("is quarantined: its states" in note for note in listener.notes) == 1
    assert all(t.isfinite().all() for t in load_file(tmp_path / "out/model.safetensors").values())


def test_a_chat_that_is_set_aside_on_the_way_leaves_the_step_as_if_it_taught_nothing(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Path
) -> None:
    """B7: neither its NaN nor its share of the step's mean."""
    bad = kept_for(data, validation=False)[3]

    def without_its_mask(directory: str) -> Prepared:
        prepared = load_prepared(directory)
        prepared.document(bad)[1].zero_()  # a view of the whole mask
        return prepared

    same = {"hidden_states": "online", "epochs": 1, "tokens_per_batch": 128, "accumulate": 2}
    with monkeypatch.context() as patch:
        patch.setattr(train_module, "load_prepared", without_its_mask)
        run(output="untaught", **same)
    spoil(monkeypatch, data, bad)
    with pytest.raises(Stopped):
        run(Listener(lambda me: any("is quarantined" in note for note in me.notes)), **same)
    monkeypatch.undo()  # what was set aside stays so, also where it would now do
    assert run(resume=tmp_path, **same).quarantined == 1
    one, other = (load_file(tmp_path / n / "model.safetensors") for n in ("untaught", "out"))
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, atol=1e-3, rtol=1e-2, msg=name)


@pytest.mark.parametrize("validation", [False, True])
def test_too_many_chats_that_are_set_aside_on_the_way_end_the_run(
    run: Train, monkeypatch: pytest.MonkeyPatch, data: Path, validation: bool
) -> None:
    """B7: more than 5 %, be they trained on or validated with."""
    chosen = [*kept_for(data, validation=validation), *kept_for(data, validation=False)][:3]
    spoil(monkeypatch, data, *chosen)
    with pytest.raises(DataError, match="3 of 40 documents give NaN"):
        run(hidden_states="online", validate_every=3)


def test_a_time_limit_shortens_the_schedule(run: Train) -> None:
    listener = Listener()
    result = run(listener, epochs=2000, max_minutes=0.06)
    assert result.steps < 2000 and result.seconds < 30
    told = [note.split(" (")[0].split() for note in listener.notes if "shortened" in note]
    assert told and all(int(after) < 0.9 * int(before) for before, *_, after in told)
    assert listener.fractions[-1] == 1.0


def test_a_step_without_a_trained_token_is_skipped_and_counted(
    run: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C12: a loss of exactly 0 has no gradient."""
    emptied: list[int] = []

    def with_an_empty_mask(directory: str) -> Prepared:
        prepared = load_prepared(directory)
        emptied.append(int((~prepared.validation).nonzero()[0]))
        prepared.document(emptied[0])[1].zero_()  # a view of the whole mask
        return prepared

    monkeypatch.setattr(train_module, "load_prepared", with_an_empty_mask)
    listener = Listener()
    result = run(listener, epochs=1, hidden_states="online", tokens_per_batch=1)
    assert any("without a trained token" in note for note in listener.notes)
    assert result.steps > 0
    assert [v["skipped"] for v in listener.steps.values() if "skipped" in v][-1] == 1


def test_a_loss_that_is_no_number_stops_with_a_sentence(run: Train, tmp_path: Path) -> None:
    with pytest.raises(SpeclabError, match="the loss is nan"):
        run(lr=1e30, grad_clip=1e30)
    assert not (tmp_path / "out").exists()


def test_a_validation_that_crashes_keeps_the_last_weights(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C4: whatever happens while the draft is judged."""

    def crash(self: Loop) -> dict[str, float]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Loop, "evaluate", crash)
    with pytest.raises(RuntimeError):
        run(validate_every=7, save_every=1000)
    assert [p.name for p in (tmp_path / "out.checkpoints").iterdir()] == ["step-0000007"]


def test_data_of_another_tokenizer_or_vocabulary_is_refused(
    run: Train, tmp_path: Path, tiny_verifier: Path
) -> None:
    wide = tiny.build_verifier(tmp_path / "wide", vocab=260)
    with pytest.raises(PairingError, match="a vocabulary of 256"):
        run(verifier=str(wide))
    other = tmp_path / "other"
    shutil.copytree(tiny_verifier, other)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text + " ")
    with pytest.raises(PairingError, match="another tokenizer"):
        run(verifier=str(other))


def test_a_chat_that_is_longer_than_a_row_is_told(run: Train, data: Path) -> None:
    """B13: it decides over memory, not the token budget."""
    longest = int(load_prepared(data).lengths.max())
    for budget, told in ((longest, 0), (longest - 1, 1)):
        listener = Listener()
        run(listener, output=f"b{budget}", epochs=1, tokens_per_batch=budget)
        assert sum("the longest chat has" in note for note in listener.notes) == told


def test_patience_without_anything_to_judge_by_is_refused(
    run: Train, tmp_path: Path, tiny_verifier: Path
) -> None:
    """C13: it would never be lost."""
    whole = prepare_chats(tmp_path, tiny_verifier, count=6, validation_fraction=0.0)
    with pytest.raises(InputError, match="nothing to judge by"):
        run(data=str(whole), patience=3)
    listener = Listener()
    run(listener, data=str(whole), epochs=1)
    assert any("nothing to judge weights by" in note for note in listener.notes)


def test_wrong_input_is_named(run: Train, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a prepared data set"):
        run(data=str(tmp_path))
    with pytest.raises(PairingError, match="at most 8"):
        run(aux_layers=(2, 4, 9))
    with pytest.raises(CheckpointError, match="not a directory"):
        run(verifier=str(tmp_path / "nowhere"))
    (tmp_path / "taken").mkdir()
    with pytest.raises(Conflict, match="exists already"):
        run(output="taken")


def test_batches_keep_the_budget_and_every_document_once() -> None:
    lengths = [5, 50, 7, 200, 3, 90, 40]
    order = epoch_order(range(7), seed=1, epoch=2)
    packed = batches(lengths, 100, order)
    assert [d for batch in packed for d in batch] == order
    assert all(sum(lengths[d] for d in b) <= 100 or len(b) == 1 for b in packed)
    assert order == epoch_order(range(7), seed=1, epoch=2) != epoch_order(range(7), 1, 3)


def test_the_schedule_warms_up_and_ends_at_zero() -> None:
    schedule = Schedule(100, 0.1)
    factors = [schedule.factor(step) for step in range(101)]
    assert factors[0] > 0 and factors[9] < factors[10] == pytest.approx(1.0, abs=0.01)
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[100] == pytest.approx(0.0)


def test_a_shortened_schedule_bends_without_a_jump() -> None:
    schedule = Schedule(1000, 0.02)
    before = schedule.factor(300)
    schedule.shorten(300, 400)
    assert schedule.factor(300) == pytest.approx(before)
    assert schedule.factor(400) == pytest.approx(0.0)
    schedule.shorten(350, 900)  # never longer again
    assert schedule.total == 400
    assert Schedule.of(schedule.state()) == schedule
