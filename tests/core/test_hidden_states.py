"""The cache of the verifier's states: right, whole, of this verifier, and resumable."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from speculators_core.data import capacity, hidden_states, occupancy, states
from speculators_core.data.hidden_states import StateCache, cache_states
from speculators_core.data.prepare import Prepared, load_prepared
from speculators_core.data.states import InProcess, States, Tokens
from speculators_core.errors import DataError, PairingError, Stopped, Unavailable
from speculators_core.models.verifier import Verifier, load_verifier
from tests import tiny
from tests.core.listening import Listener
from tests.core.small_data import prepare_chats

LAYERS = (2, 4, 5)
DOCUMENTS, FILES = 20, 4


class Counted(InProcess):
    """In-process states that count the files they were asked for; `spoil` changes what it gives
    for the n-th."""

    def __init__(
        self,
        verifier: Verifier,
        spoil: Callable[[int, list[States]], None] = lambda n, found: None,
        layers: Sequence[int] = LAYERS,
    ) -> None:
        super().__init__(verifier, layers)
        self.asked = 0
        self.spoil = spoil

    def states(
        self, documents: Sequence[Tokens], stopping: Callable[[], bool] = lambda: False
    ) -> list[States]:
        found = super().states(documents, stopping)
        self.spoil(self.asked, found)
        self.asked += 1
        return found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path) -> Prepared:
    folder = tmp_path_factory.mktemp("data")
    return load_prepared(prepare_chats(folder, tiny_verifier, count=DOCUMENTS))


@pytest.fixture(scope="module")
def verifier(tiny_verifier: Path) -> Verifier:
    return load_verifier(tiny_verifier)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch, prepared: Prepared) -> None:
    monkeypatch.setattr(hidden_states, "TOKENS_A_FILE", int(prepared.lengths.sum()) // FILES + 60)


@pytest.fixture
def cache(tmp_path: Path, prepared: Prepared, verifier: Verifier) -> Callable[..., StateCache]:
    def make(
        listener: Listener | None = None, producer: InProcess | None = None, **more: str
    ) -> StateCache:
        producer = producer or InProcess(verifier, LAYERS)
        return cache_states(prepared, producer, tmp_path / "states", listener, **more)

    return make


def files_of(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "states").glob("*.safetensors"))


def test_states_are_those_of_transformers(
    cache: Callable[..., StateCache], prepared: Prepared, verifier: Verifier
) -> None:
    found = cache()
    for document in range(DOCUMENTS):
        ids, _ = prepared.document(document)
        out = verifier.model(ids[None], output_hidden_states=True)
        expected = torch.cat([out.hidden_states[k][0] for k in LAYERS], dim=-1)
        torch.testing.assert_close(found.states(document).aux, expected, atol=1e-4, rtol=1e-4)


def test_the_final_state_is_not_normed_and_gives_the_verifiers_own_logits(
    cache: Callable[..., StateCache], prepared: Prepared, verifier: Verifier
) -> None:
    """A7"""
    for document in range(3):
        states = cache().states(document)
        ids, mask = prepared.document(document)
        expected = verifier.model(ids[None]).logits[0]
        torch.testing.assert_close(verifier.logits(states.final), expected, atol=1e-3, rtol=1e-3)
        asked = (mask[:-1] & mask[1:]).nonzero().flatten()
        assert torch.equal(states.best[asked].long(), expected[asked].argmax(-1))
        assert (states.best[:-1][~(mask[:-1] & mask[1:])] == -1).all()


def test_nothing_is_computed_twice_and_only_what_is_missing(
    cache: Callable[..., StateCache], tmp_path: Path, verifier: Verifier
) -> None:
    """B9"""
    cache()
    producer = Counted(verifier)
    cache(producer=producer)
    assert producer.asked == 0
    assert len(files_of(tmp_path)) == FILES
    for file in files_of(tmp_path)[:3]:
        file.unlink()
    cache(producer=producer)
    assert producer.asked == 3


def test_a_stopped_run_continues_to_the_same_files(
    cache: Callable[..., StateCache], tmp_path: Path, verifier: Verifier
) -> None:
    producer = Counted(verifier)
    with pytest.raises(Stopped):
        cache(Listener(lambda me: producer.asked == 2), producer)
    assert len(files_of(tmp_path)) == 2
    cache()
    resumed = {f.name: load_file(f) for f in files_of(tmp_path)}
    shutil.rmtree(tmp_path / "states")
    cache()
    assert len(resumed) == FILES
    for file in files_of(tmp_path):
        for name, tensor in load_file(file).items():
            assert torch.equal(tensor, resumed[file.name][name])


def test_a_stop_is_heard_between_two_forward_passes(
    prepared: Prepared, verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "TOKENS_A_FORWARD", 100)
    asked: list[int] = []
    documents = [prepared.document(i) for i in range(6)]
    with pytest.raises(Stopped):
        InProcess(verifier, LAYERS).states(documents, lambda: asked.append(1) or len(asked) == 3)


def test_a_file_cut_in_half_is_reported_and_made_again(
    cache: Callable[..., StateCache], tmp_path: Path
) -> None:
    """B11"""
    cache()
    file = files_of(tmp_path)[0]
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
    """B19, at reading"""
    cache()
    file = files_of(tmp_path)[0]
    with safe_open(file, framework="pt") as opened:
        header = opened.metadata()
    tensors = load_file(file)
    save_file({**tensors, "final": tensors["final"][:-3].clone()}, file, metadata=header)
    listener = Listener()
    cache(listener)
    assert any("made again" in note for note in listener.notes)
    assert len(load_file(file)["final"]) == len(tensors["final"])


def test_states_that_are_shorter_than_their_tokens_are_not_written(
    cache: Callable[..., StateCache], tmp_path: Path, verifier: Verifier
) -> None:
    """B19, at writing"""

    def short(n: int, found: list[States]) -> None:
        found[2] = States(found[2].aux, found[2].final[:-1], found[2].best)

    with pytest.raises(DataError, match=r"document 2 has \d+ tokens, the verifier gave"):
        cache(producer=Counted(verifier, short))
    assert files_of(tmp_path) == []


def test_another_verifiers_states_are_refused(
    cache: Callable[..., StateCache], tmp_path: Path, verifier: Verifier
) -> None:
    """B17"""
    cache()
    other = load_verifier(tiny.build_verifier(tmp_path / "other", seed=9))
    with pytest.raises(PairingError, match="another verifier"):
        cache(producer=InProcess(other, LAYERS))
    with pytest.raises(PairingError, match="another layers"):
        cache(producer=InProcess(verifier, (1, 4, 5)))
    with pytest.raises(PairingError, match="another dtype"):
        cache(dtype="float16")


def test_the_header_says_what_the_states_are(
    cache: Callable[..., StateCache], tmp_path: Path
) -> None:
    """B17"""
    cache()
    with safe_open(files_of(tmp_path)[0], framework="pt") as file:
        header = file.metadata()
    assert header["layers"] == "[2, 4, 5]" and header["convention"] == "after"
    assert header["final_normed"] == "false" and header["dtype"] == "float32"
    assert header["made_by"] == "transformers"


def test_a_document_with_nan_is_quarantined_and_the_rest_goes_on(
    cache: Callable[..., StateCache], verifier: Verifier
) -> None:
    """B7"""

    def spoil(n: int, found: list[States]) -> None:
        if n == FILES - 1:
            found[-1].aux[0, 0] = float("nan")

    listener = Listener()
    assert cache(listener, Counted(verifier, spoil)).quarantined == {DOCUMENTS - 1}
    assert any("1 of 20 documents are quarantined" in note for note in listener.notes)
    assert cache().quarantined == {DOCUMENTS - 1}  # the cache remembers


def test_too_many_bad_documents_stop_the_run_at_once(
    cache: Callable[..., StateCache], verifier: Verifier
) -> None:
    """B7: not after hours of more of them."""

    def spoil(n: int, found: list[States]) -> None:
        found[0].final[0, 0] = float("inf")

    producer = Counted(verifier, spoil)
    with pytest.raises(DataError, match="2 of 20 documents"):
        cache(producer=producer)
    assert producer.asked == 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_states_are_kept_in_the_precision_that_was_asked_for(
    cache: Callable[..., StateCache], dtype: str, prepared: Prepared, verifier: Verifier
) -> None:
    kept = cache(dtype=dtype).states(3)
    exact = InProcess(verifier, LAYERS).states([prepared.document(3)])[0]
    assert kept.aux.dtype == kept.final.dtype == getattr(torch, dtype)
    close = 2 * torch.finfo(kept.aux.dtype).eps
    torch.testing.assert_close(kept.aux.float(), exact.aux, atol=1e-3, rtol=close)


def test_states_beyond_float16_are_not_kept_in_it(
    cache: Callable[..., StateCache], tmp_path: Path, verifier: Verifier
) -> None:
    """C7"""

    def large(n: int, found: list[States]) -> None:
        found[0].final[0, 0] = 70000.0

    with pytest.raises(DataError, match="states reach 70000, float16 ends at 65504"):
        cache(producer=Counted(verifier, large), dtype="float16")
    assert files_of(tmp_path) == []
    cache(producer=Counted(verifier, large), dtype="float32")


def test_one_long_document_among_short_ones_costs_no_more_than_itself(
    tmp_path: Path, verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B13: nothing is padded to the longest, in a forward pass or in a file."""
    lengths = [12, 30, 25] * 11 + [800] + [18, 7] * 33
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    several = SimpleNamespace(
        ids=torch.randint(0, 250, (total,), generator=generator).int(),
        lengths=torch.tensor(lengths),
        meta=SimpleNamespace(key="k"),
    )
    several.starts = several.lengths.cumsum(0) - several.lengths
    several.document = lambda i: Prepared.document(several, i)  # type: ignore[arg-type]
    several.mask = torch.ones(total, dtype=torch.bool)
    monkeypatch.setattr(hidden_states, "TOKENS_A_FILE", 400)
    monkeypatch.setattr(states, "TOKENS_A_FORWARD", 200)
    passes: list[int] = []
    verifier.stack.register_forward_pre_hook(lambda module, args: passes.append(args[0].numel()))
    cache_states(several, InProcess(verifier, LAYERS), tmp_path / "states")  # type: ignore[arg-type]
    assert max(passes) == 800 and sorted(passes)[-2] <= 200
    assert sum(passes) < 1.5 * total
    sizes = [len(load_file(file)["ids"]) for file in files_of(tmp_path)]
    assert sum(sizes) == total and sorted(sizes)[-2] <= 400 < max(sizes) == 800


def test_no_room_is_said_before_anything_is_computed(
    cache: Callable[..., StateCache],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    verifier: Verifier,
) -> None:
    """B12"""
    monkeypatch.setattr(capacity.shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
    producer = Counted(verifier)
    with pytest.raises(
        Unavailable, match=r"hidden states need .* tokens x 4 states x 64 x 4 bytes"
    ):
        cache(producer=producer)
    assert producer.asked == 0 and not files_of(tmp_path)


def test_a_cache_that_is_read_is_not_removed_and_its_last_use_is_known(
    cache: Callable[..., StateCache], tmp_path: Path
) -> None:
    place = tmp_path / "states"
    kept = cache()
    os.utime(place / occupancy.MARK, (0, 0))
    second = cache()
    assert occupancy.last_used(place) > 0
    assert occupancy.facts_of(place)["layers"] == "[2, 4, 5]"
    assert float(occupancy.facts_of(place)["tokens_per_second"]) > 0
    kept.lock.close()
    assert occupancy.occupied(place) and not occupancy.remove(place)
    assert len(files_of(tmp_path)) == FILES
    second.lock.close()
    assert not occupancy.occupied(place) and occupancy.remove(place)
    assert not place.exists()
    cache()
    assert len(files_of(tmp_path)) == FILES


def test_an_aux_layer_beyond_the_verifier_is_refused(
    cache: Callable[..., StateCache], verifier: Verifier
) -> None:
    with pytest.raises(PairingError, match="aux layer 9 is out of range"):
        cache(producer=InProcess(verifier, (2, 4, 9)))
