"""The cache of the verifier's states: right, whole, of this verifier, and resumable."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculators_core.data import hidden_states
from speculators_core.data.hidden_states import (
    StateCache,
    bytes_needed,
    cache_states,
    compute_states,
)
from speculators_core.data.prepare import Prepared, load_prepared
from speculators_core.errors import DataError, PairingError, Stopped, Unavailable
from speculators_core.models.verifier import Verifier, load_verifier
from tests import tiny
from tests.core.listening import Listener
from tests.core.small_data import prepare_chats

LAYERS = (2, 4, 5)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path) -> Prepared:
    return load_prepared(prepare_chats(tmp_path_factory.mktemp("data"), tiny_verifier, count=20))


@pytest.fixture(scope="module")
def verifier(tiny_verifier: Path) -> Verifier:
    return load_verifier(tiny_verifier)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_states, "DOCUMENTS_A_FILE", 6)


@pytest.fixture
def cache(tmp_path: Path, prepared: Prepared, verifier: Verifier) -> Callable[..., StateCache]:
    def make(listener: Listener | None = None, layers: tuple[int, ...] = LAYERS) -> StateCache:
        return cache_states(prepared, verifier, layers, tmp_path / "states", listener)

    return make


def test_states_are_those_of_transformers(
    cache: Callable[..., StateCache], prepared: Prepared, verifier: Verifier
) -> None:
    states = cache().states(7)
    ids, _ = prepared.document(7)
    out = verifier.model(ids[None], output_hidden_states=True)
    expected = torch.cat([out.hidden_states[k][0] for k in LAYERS], dim=-1)
    torch.testing.assert_close(states.aux, expected, atol=1e-4, rtol=1e-4)


def test_the_final_state_is_not_normed_and_gives_the_verifiers_own_logits(
    cache: Callable[..., StateCache], prepared: Prepared, verifier: Verifier
) -> None:
    for document in range(3):
        states = cache().states(document)
        ids, mask = prepared.document(document)
        logits = verifier.final_norm(states.final) @ verifier.lm_head.T
        expected = verifier.model(ids[None]).logits[0]
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)
        asked = (mask[:-1] & mask[1:]).nonzero().flatten()
        assert torch.equal(states.best[asked].long(), expected[asked].argmax(-1))
        assert (states.best[:-1][~(mask[:-1] & mask[1:])] == -1).all()


def test_nothing_is_computed_twice_and_only_what_is_missing(
    cache: Callable[..., StateCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache()
    calls: list[int] = []

    def counting(*args: object) -> object:
        calls.append(1)
        return compute_states(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(hidden_states, "compute_states", counting)
    cache()
    assert calls == []
    files = sorted((tmp_path / "states").iterdir())
    assert len(files) == 4  # 20 documents, 6 a file
    files[1].unlink()
    cache()
    assert len(calls) == 1


def test_a_stopped_run_continues_to_the_same_files(
    cache: Callable[..., StateCache], tmp_path: Path
) -> None:
    with pytest.raises(Stopped):
        cache(Listener(lambda me: me.asked > 2))
    assert len(list((tmp_path / "states").iterdir())) == 2
    cache()
    resumed = {f.name: load_file(f) for f in (tmp_path / "states").iterdir()}
    shutil.rmtree(tmp_path / "states")
    cache()
    for file in (tmp_path / "states").iterdir():
        for name, tensor in load_file(file).items():
            assert torch.equal(tensor, resumed[file.name][name])


def test_a_file_cut_in_half_is_reported_and_made_again(
    cache: Callable[..., StateCache], tmp_path: Path
) -> None:
    cache()
    file = sorted((tmp_path / "states").iterdir())[0]
    whole = {name: tensor.clone() for name, tensor in load_file(file).items()}
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    listener = Listener()
    cache(listener)
    again = load_file(file)
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())
    assert any("damaged" in note for note in listener.notes)


def test_states_that_are_too_short_are_made_again(
    cache: Callable[..., StateCache], tmp_path: Path
) -> None:
    header = cache().header
    file = sorted((tmp_path / "states").iterdir())[0]
    tensors = load_file(file)
    save_file({**tensors, "final": tensors["final"][:-3].clone()}, file, metadata=header)
    listener = Listener()
    cache(listener)
    assert any("made again" in note for note in listener.notes)
    assert len(load_file(file)["final"]) == len(tensors["final"])


def test_another_verifiers_states_are_refused(
    cache: Callable[..., StateCache], tmp_path: Path, prepared: Prepared
) -> None:
    cache()
    other = load_verifier(tiny.build_verifier(tmp_path / "other", seed=9))
    with pytest.raises(PairingError, match="another verifier"):
        cache_states(prepared, other, LAYERS, tmp_path / "states")
    with pytest.raises(PairingError, match="another layers"):
        cache(layers=(1, 4, 5))


def test_the_header_says_what_the_states_are(cache: Callable[..., StateCache]) -> None:
    header = cache().header
    assert header["layers"] == "[2, 4, 5]" and header["convention"] == "after"
    assert header["final_normed"] == "false" and header["dtype"] == "float32"


def test_a_document_with_nan_is_quarantined_and_the_rest_goes_on(
    cache: Callable[..., StateCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(verifier: Verifier, layers: object, documents: list) -> list:
        states = compute_states(verifier, LAYERS, documents)
        if len(documents) == 2:  # the last file
            states[1].aux[0, 0] = float("nan")
        return states

    monkeypatch.setattr(hidden_states, "compute_states", spoilt)
    listener = Listener()
    assert cache(listener).quarantined == {19}
    assert any("1 of 20 documents are quarantined" in note for note in listener.notes)


def test_too_many_bad_documents_stop_the_run(
    cache: Callable[..., StateCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(verifier: Verifier, layers: object, documents: list) -> list:
        states = compute_states(verifier, LAYERS, documents)
        states[0].final[0, 0] = float("inf")
        return states

    monkeypatch.setattr(hidden_states, "compute_states", spoilt)
    with pytest.raises(DataError, match="4 of 20 documents"):
        cache()


def test_no_room_is_said_before_anything_is_computed(
    cache: Callable[..., StateCache], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "speculators_core.data.hidden_states.shutil.disk_usage",
        lambda place: SimpleNamespace(free=1000),
    )
    with pytest.raises(Unavailable, match="the hidden states need"):
        cache()
    assert not list((tmp_path / "states").iterdir())


def test_the_estimate_is_tokens_times_states_times_width() -> None:
    assert bytes_needed(8192, 3, 4096, 2) == 8192 * 4 * 4096 * 2


def test_an_aux_layer_beyond_the_verifier_is_refused(cache: Callable[..., StateCache]) -> None:
    with pytest.raises(PairingError, match="aux layer 9 is out of range"):
        cache(layers=(2, 4, 9))
