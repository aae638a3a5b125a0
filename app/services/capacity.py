"""What preparing and training would take of the lab's disk, and how long, before either starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from statistics import median

from app.services import caches, data_sets, references, runs, slots
from app.services.views import DataSetView, RunView
from app.settings import settings
from app.store.models import RunState, SlotKind
from speculators_core.data import capacity
from speculators_core.data.capacity import Estimate, Speed
from speculators_core.errors import NotFound
from speculators_core.models.verifier_config import read_verifier
from speculators_core.params import JobKind, TrainParams

_LOOKED_AT = 20  # runs
_METRICS = 200  # rows


def of_preparing(data: Sequence[str]) -> Estimate:
    """Of these sources; one that is not here yet (a hub id, a run's output) counts nothing."""
    return capacity.of_preparing(list(map(_here, data)), _place(), _preparing_speed())


def of_training(params: TrainParams, tokens: int, draft_vocab_size: int | None) -> Estimate:
    """On so many tokens; a draft vocabulary of None is the verifier's.

    Raises `NotFound` where nothing is known of the verifier yet, a hub id for example.
    """
    verifier = references.resolve(params.verifier, "verifier")
    if not Path(verifier).is_dir():
        raise NotFound(f"{params.verifier} is not here yet", hint="bring it: see the Models page")
    facts = read_verifier(verifier)
    return capacity.of_training(
        params,
        tokens,
        facts,
        draft_vocab_size or facts.vocab_size,
        _place(),
        computed_in="bfloat16" if _has_gpu() else "float32",
        states_speed=caches.states_speed(verifier),
        training_speed=_training_speed(params.verifier),
    )


def of_data_set(one: DataSetView) -> int:
    """Its tokens: counted where it is prepared, else guessed from its bytes."""
    counted = one.facts.get("tokens")
    return counted if isinstance(counted, int) else tokens_in(size_of(one))


def tokens_in(size: int) -> int:
    """About so many tokens are in so many bytes of chats."""
    return math.ceil(size / capacity.TEXT_BYTES_A_TOKEN)


def size_of(one: DataSetView) -> int:
    """Bytes on disk; 0 where it is gone."""
    return _size(one.path, one.digest)


@lru_cache(maxsize=1024)
def _size(path: str, digest: str) -> int:
    """Of content that has not changed: a page asks every two seconds."""
    place = Path(path)
    files = place.rglob("*") if place.is_dir() else [place]
    return sum(file.stat().st_size for file in files if file.is_file())


def _here(reference: str) -> str:
    known = {one.name: one.path for one in data_sets.list_data_sets()}
    return known.get(reference, str(Path(reference).expanduser()))


def _place() -> Path:
    return settings().home / "datasets"


def _has_gpu() -> bool:
    return any(slot.kind is SlotKind.GPU for slot in slots.list_slots())


def _preparing_speed() -> Speed | None:
    for run in _succeeded(JobKind.PREPARE):
        tokens = (run.result or {}).get("tokens")
        if isinstance(tokens, int) and tokens and run.seconds:
            return Speed(tokens_per_second=tokens / run.seconds, source=f"as in run {run.id}")
    return None


def _training_speed(verifier: str) -> Speed | None:
    """Of the newest training for this verifier, whatever its draft was."""
    for run in _succeeded(JobKind.TRAIN):
        if run.params.get("verifier") == verifier:
            rows = runs.metrics(run.id, limit=_METRICS)
            seen = [speed for row in rows if (speed := row.values.get("tokens_per_second"))]
            if seen:
                return Speed(tokens_per_second=median(seen), source=f"as in run {run.id}")
    return None


def _succeeded(kind: JobKind) -> Sequence[RunView]:
    return runs.list_runs(kind=kind, state=RunState.SUCCEEDED, limit=_LOOKED_AT).items
