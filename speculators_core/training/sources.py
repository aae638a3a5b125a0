"""Documents with the verifier's states, from a disk cache or computed as training goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from speculators_core.data.hidden_states import (
    StateCache,
    cache_key,
    cache_states,
    expected_header,
    is_finite,
)
from speculators_core.data.prepare import Prepared
from speculators_core.data.states import InProcess, StateProducer, States, Tokens
from speculators_core.errors import InputError
from speculators_core.models.verifier import Verifier
from speculators_core.params import TrainParams
from speculators_core.progress import Progress
from speculators_core.training.packing import Document
from speculators_core.training.quarantine import Quarantine

Source = Callable[[Sequence[int]], list[Document]]
"""Documents by number, with the verifier's states; without those that turn out to be unusable."""


def open_source(
    params: TrainParams,
    prepared: Prepared,
    verifier: Verifier,
    layers: list[int],
    progress: Progress,
) -> tuple[Source, Quarantine]:
    """What training reads from, as the parameters ask; and the documents that are unusable.

    With `hidden_states` vllm the cache is expected to be there (`training.extraction`).
    """
    here = InProcess(verifier, layers)
    quarantine = Quarantine(len(prepared.lengths), params.data, progress)
    if params.hidden_states == "online":
        quarantine.growing = True
        return _computed(prepared, here, quarantine), quarantine
    producer = _MadeBefore(verifier, layers) if params.hidden_states == "vllm" else here
    place = states_place(params, prepared, here)
    cache = cache_states(prepared, producer, place, progress, dtype=params.states_dtype)
    quarantine.documents = cache.quarantined
    return _from_cache(cache, prepared), quarantine


def states_place(params: TrainParams, prepared: Prepared, producer: StateProducer) -> Path:
    """Where the cached states of this training lie: beside the prepared data."""
    header = expected_header(prepared, producer, params.states_dtype)
    data = Path(params.data)
    return data.parent / f"{data.name}.states-{cache_key(header)}"


class _MadeBefore(InProcess):
    """Computes nothing: a server has."""

    def states(
        self, documents: Sequence[Tokens], stopping: Callable[[], bool] = lambda: False
    ) -> list[States]:
        raise InputError(
            "hidden states are missing, which a vLLM server makes before training",
            where="hidden_states",
            hint="train with `speclab train` or as a run, or set hidden_states to cached",
        )


def _computed(prepared: Prepared, producer: StateProducer, quarantine: Quarantine) -> Source:
    def online(numbers: Sequence[int]) -> list[Document]:
        asked = [prepared.document(number) for number in numbers]
        found = _documents(asked, producer.states(asked))
        sound = []
        for number, document in zip(numbers, found, strict=True):
            if is_finite(document.states):
                sound.append(document)
            else:
                quarantine.add(number)
        return sound

    return online


def _from_cache(cache: StateCache, prepared: Prepared) -> Source:
    def cached(numbers: Sequence[int]) -> list[Document]:
        return _documents(
            [prepared.document(n) for n in numbers], [cache.states(n) for n in numbers]
        )

    return cached


def _documents(
    documents: Sequence[tuple[torch.Tensor, torch.Tensor]], states: Sequence[States]
) -> list[Document]:
    return [
        Document(ids, mask, found) for (ids, mask), found in zip(documents, states, strict=True)
    ]
