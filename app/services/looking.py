"""A look into registered data: the facts of a prepared set, any of its samples, the first chats."""

from __future__ import annotations

from bisect import bisect_left
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from app.services.views import DataSetView, View
from speculators_core.data import samples
from speculators_core.data.rows import read_rows
from speculators_core.data.samples import PreparedFacts, Sample
from speculators_core.errors import DataError, NotFound


class Look(View):
    """A sample and its neighbours, by number from 0; `place` of `count` among those looked at."""

    sample: Sample
    previous: int | None
    next: int | None
    place: int
    count: int


def facts(one: DataSetView) -> PreparedFacts:
    """Raises `DataError` where its directory is gone or of an earlier version."""
    return samples.read_facts(one.path)


def look(one: DataSetView, number: int, *, validation_only: bool = False) -> Look:
    """Sample `number`, or the nearest behind it that is kept for validation.

    Raises `NotFound` where there is none, `DataError` where the data is damaged.
    """
    numbers = samples.validation_samples(one.path) if validation_only else range(one.samples)
    if not numbers:
        raise NotFound("no sample is kept for validation", where=one.name)
    place = min(bisect_left(numbers, max(0, number)), len(numbers) - 1)
    return Look(
        sample=samples.read_sample(one.path, numbers[place]),
        previous=numbers[place - 1] if place else None,
        next=numbers[place + 1] if place + 1 < len(numbers) else None,
        place=place,
        count=len(numbers),
    )


def first_rows(one: DataSetView, count: int = 5) -> list[dict[str, Any]]:
    """The first rows of a file of chats or prompts, up to one that can't be read."""
    found: list[dict[str, Any]] = []
    with suppress(DataError):
        found.extend(row.values for row in islice(read_rows(Path(one.path)), count))
    return found
