"""States from a server: what is asked of it, what is believed of its answers, how much it may lay
down at once. The server here is a stand-in; the real one is in tests/workers/test_states_server.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from speculators_core.data.prepare import Prepared, load_prepared
from speculators_core.data.states import InProcess
from speculators_core.data.vllm_states import VllmStates
from speculators_core.errors import DataError, InputError, PairingError, Stopped, Unavailable
from speculators_core.models.verifier import Verifier, load_verifier
from speculators_core.params import TrainParams
from speculators_core.progress import Quiet
from speculators_core.training.extraction import make_states
from speculators_core.training.sources import open_source
from tests.core.small_data import prepare_chats
from tests.core.stand_in_vllm import Change, StandIn

LAYERS = (2, 4, 5)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path) -> Path:
    return prepare_chats(tmp_path_factory.mktemp("data"), tiny_verifier, count=12)


@pytest.fixture(scope="module")
def prepared(data: Path) -> Prepared:
    return load_prepared(data)


@pytest.fixture(scope="module")
def verifier(tiny_verifier: Path) -> Verifier:
    return load_verifier(tiny_verifier)


@pytest.fixture
def asking(
    tmp_path: Path, tiny_verifier: Path, verifier: Verifier
) -> Callable[..., tuple[StandIn, VllmStates]]:
    """A stand-in and the producer that asks it, which has the verifier's ends alone."""

    def make(change: Change = lambda n, t: t, **more: int) -> tuple[StandIn, VllmStates]:
        ends = load_verifier(tiny_verifier, ends_only=True)
        stand_in = StandIn(verifier, change)
        return stand_in, VllmStates(
            ends, LAYERS, 500, tmp_path / "prepared", stand_in.start, Quiet(), **more
        )

    return make


def documents(prepared: Prepared, count: int = 12) -> list[tuple[Tensor, Tensor]]:
    return [prepared.document(i) for i in range(count)]


def test_they_are_those_of_the_verifier_in_this_process(asking, prepared, verifier, tmp_path):
    stand_in, producer = asking()
    with producer:
        assert stand_in.started == 0  # only once something is missing
        found = producer.states(documents(prepared))
        producer.states(documents(prepared, 2))
        assert stand_in.started == 1
    for one, same in zip(
        found, InProcess(verifier, LAYERS).states(documents(prepared)), strict=True
    ):
        torch.testing.assert_close(one.aux, same.aux, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(one.final, same.final, atol=1e-4, rtol=1e-3)
        assert torch.equal(one.best, same.best)
    assert stand_in.extraction.layers == (2, 4, 5, 8)
    assert list(tmp_path.iterdir()) == []  # the staging directory is gone


def test_an_answer_waits_until_there_is_room_for_its_states(asking, prepared):
    """B10: what lies in the staging directory stays within the quota; nothing fails."""
    longest = int(prepared.lengths.max())
    room = 2 * longest * 4 * 64 * 4
    stand_in, producer = asking(staging_bytes=room)
    with producer:
        assert len(producer.states(documents(prepared))) == 12
    assert 0 < stand_in.largest <= room + 4 * 1024  # headers of the files beside


def test_a_document_larger_than_the_quota_goes_alone(asking, prepared):
    _, producer = asking(staging_bytes=1)
    with producer:
        assert len(producer.states(documents(prepared, 3))) == 3


def without_rows(number: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As a prefix cache leaves it: the second answer has new tokens only."""
    rows = tensors["hidden_states"]
    return {**tensors, "hidden_states": rows[5:] if number == 1 else rows}


def unwritten(number: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As a page that the cache took over and nobody wrote."""
    rows = tensors["hidden_states"].clone()
    rows[:5] = 0.0
    return {**tensors, "hidden_states": rows}


def of_other_tokens(number: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "token_ids": tensors["token_ids"].flip(0)}


def of_fewer_layers(number: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "hidden_states": tensors["hidden_states"][:, 1:]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_rows, "states of shape .* its prefix cache must be off"),
        (unwritten, "were never written"),
        (of_other_tokens, "other tokens than it was asked for"),
        (of_fewer_layers, r"states of shape \[\d+, 3, 64\], expected \[\d+, 4, 64\]"),
    ],
)
def test_an_answer_that_is_not_whole_is_rejected(asking, prepared, change, message):
    """B19, B20: the same prompt twice."""
    _, producer = asking(change)
    same = documents(prepared, 1) * 2
    with producer, pytest.raises(DataError, match=message):
        producer.states(same)


def test_states_that_do_not_lead_to_what_the_server_says_are_refused(asking, prepared):
    """B17: a final state that is normed, or of another layer, is found out."""
    stand_in, producer = asking()
    ids = prepared.document(0)[0]
    last = stand_in.verifier.states(ids[None], [8])[8][0, -1]
    stand_in.says = int(stand_in.verifier.logits(last).argmin())
    with producer, pytest.raises(PairingError, match="its last state leads to"):
        producer.states(documents(prepared, 1))


def test_a_file_elsewhere_is_neither_read_nor_removed(asking, prepared, tmp_path):
    stand_in, producer = asking()
    stand_in.path = tmp_path / "somebodys.safetensors"
    with producer, pytest.raises(InputError, match="says that its hidden states are at"):
        producer.states(documents(prepared, 1))
    until = time.monotonic() + 5
    while not stand_in.path.exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert stand_in.path.exists()


def test_a_stop_is_heard_while_the_server_works(asking, prepared):
    stand_in, producer = asking(staging_bytes=1)
    stand_in.writes_after = 0.3
    began = time.monotonic()
    with producer, pytest.raises(Stopped):
        producer.states(documents(prepared), lambda: time.monotonic() - began > 0.5)
    assert stand_in.asked < 6


def test_a_server_that_died_is_said_to_have(asking, prepared):
    stand_in, producer = asking()

    def died() -> None:
        raise Unavailable("the vllm server ended: out of memory")

    stand_in.check = died  # type: ignore[method-assign]
    stand_in.answer = lambda body: 1 / 0  # type: ignore[method-assign]
    with producer, pytest.raises(Unavailable, match="out of memory"):
        producer.states(documents(prepared, 1))


def test_training_reads_what_the_server_made_and_computes_none_itself(
    data, tiny_verifier, verifier, prepared
):
    """B9, with a server; and that the option is not quietly another one without it."""
    params = TrainParams(data=str(data), verifier=str(tiny_verifier), hidden_states="vllm")
    with pytest.raises(InputError, match="which a vLLM server makes before training"):
        open_source(params, prepared, verifier, list(LAYERS), Quiet())
    stand_in = StandIn(verifier)
    assert make_states(params, stand_in.start, Quiet()) == 0
    assert stand_in.started == 1 and stand_in.asked == len(prepared.lengths)
    make_states(params, stand_in.start, Quiet())
    assert stand_in.started == 1  # nothing was missing
    source, _ = open_source(params, prepared, verifier, list(LAYERS), Quiet())
    (one,) = source([3])
    same = InProcess(verifier, LAYERS).states([prepared.document(3)])[0]
    torch.testing.assert_close(one.states.aux, same.aux, atol=1e-4, rtol=1e-3)
