"""A prepared data set as a person looks at it: its facts, and any sample token by token.

Light: no torch, no tokenizer; the texts of tokens were written when the data was prepared. One
sample of a million is read in milliseconds.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from speculators_core.conversion.header import TensorInfo, read_headers
from speculators_core.data.prepared import TEXTS, TOKENS, SourceFacts, read_meta
from speculators_core.errors import CheckpointError, DataError, NotFound

_NUMPY = {"int32": "<i4", "int64": "<i8", "bool": "?"}
_COUNTED = 1 << 20  # tokens at once


class PreparedFacts(BaseModel):
    """What is in a prepared data set. `length_histogram`: (upper bound in tokens, samples)."""

    model_config = ConfigDict(frozen=True)

    samples: int
    validation_samples: int
    tokens: int
    trained_tokens: int
    trained_share: float  # of the tokens; 0 and 1 never occur in chats, text is nearly 1
    length_histogram: list[tuple[int, int]]
    skipped: dict[str, int]
    doubts: dict[str, int]  # kept, but worth a look
    coverage: float
    draft_vocab_size: int
    vocab_size: int
    seq_length: int
    verifier: str
    key: str
    sources: list[SourceFacts]
    enable_thinking: bool | None
    masked_by: str
    template_sha256: str | None


class SampleToken(BaseModel):
    """`trained`: the assistant wrote it."""

    model_config = ConfigDict(frozen=True)

    id: int
    text: str
    trained: bool


class Sample(BaseModel):
    """One sample; `source` is the `PATH:ROW` that it was made of."""

    model_config = ConfigDict(frozen=True)

    number: int
    tokens: list[SampleToken]
    source: str
    validation: bool


def read_facts(directory: str | Path) -> PreparedFacts:
    """The facts of a prepared data set. Raises `DataError` where it is none."""
    meta = read_meta(directory)
    values = meta.model_dump(exclude={"masked_tokens", "lengths", "code_version"})
    return PreparedFacts(
        **{name: value for name, value in values.items() if name in PreparedFacts.model_fields},
        trained_tokens=meta.masked_tokens,
        trained_share=meta.masked_tokens / meta.tokens,
        length_histogram=meta.lengths,
    )


def read_sample(directory: str | Path, number: int) -> Sample:
    """Sample `number` from 0. Raises `NotFound` beyond the last, `DataError` for damaged data."""
    directory = Path(directory)
    meta = read_meta(directory)
    if not 0 <= number < meta.samples:
        raise NotFound(
            f"there is no sample {number}", where=str(directory), hint=f"0 to {meta.samples - 1}"
        )
    columns = _columns(directory / TOKENS)
    ends = np.cumsum(_read(columns, "lengths", 0, number + 1))
    start, end = int(ends[-2]) if number else 0, int(ends[-1])
    ids, mask = _read(columns, "ids", start, end), _read(columns, "mask", start, end)
    texts = _texts(str(directory / TEXTS), meta.key)
    source = int(_read(columns, "source", number, number + 1)[0])
    row = int(_read(columns, "row", number, number + 1)[0])
    return Sample(
        number=number,
        tokens=[
            SampleToken(id=i, text=texts.get(str(i), ""), trained=trained)
            for i, trained in zip(ids.tolist(), mask.tolist(), strict=True)
        ],
        source=f"{meta.sources[source].path}:{row}",
        validation=bool(_read(columns, "validation", number, number + 1)[0]),
    )


def validation_samples(directory: str | Path) -> list[int]:
    """Numbers of the samples that are kept for validation, ascending. Raises `DataError`."""
    directory = Path(directory)
    meta = read_meta(directory)
    flags = _read(_columns(directory / TOKENS), "validation", 0, meta.samples)
    numbers: list[int] = np.flatnonzero(flags).tolist()
    return numbers


def trained_counts(directory: str | Path) -> NDArray[np.int64]:
    """How often each token of the vocabulary [V] is one that is trained on. Raises `DataError`."""
    directory = Path(directory)
    meta = read_meta(directory)
    columns = _columns(directory / TOKENS)
    counts = np.zeros(meta.vocab_size, np.int64)
    for start in range(0, meta.tokens, _COUNTED):
        end = min(start + _COUNTED, meta.tokens)
        ids, mask = (_read(columns, name, start, end) for name in ("ids", "mask"))
        counts += np.bincount(ids[mask], minlength=meta.vocab_size)
    return counts


def _columns(file: Path) -> dict[str, TensorInfo]:
    try:
        return {info.name: info for info in read_headers(file)}
    except (CheckpointError, OSError) as error:
        raise _damaged(file, str(error)) from error


def _read(columns: dict[str, TensorInfo], name: str, start: int, end: int) -> NDArray[Any]:
    """Entries `start:end` of a column, without reading the rest."""
    info = columns[name]
    dtype = np.dtype(_NUMPY[info.dtype])
    values: NDArray[Any] = np.fromfile(
        info.file,
        dtype=dtype,
        count=end - start,
        offset=(info.start or 0) + start * dtype.itemsize,
    )
    if len(values) != end - start:
        raise _damaged(info.file, f"{name} ends before entry {end}")
    return values


@lru_cache(maxsize=4)
def _texts(file: str, key: str) -> dict[str, str]:
    """{id: text}; `key` tells data apart that took the place of others."""
    try:
        texts: dict[str, str] = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(Path(file), str(error)) from error
    return texts


def _damaged(file: Path, why: str) -> DataError:
    return DataError(
        f"the prepared data can't be read: {why}", where=str(file), hint="prepare it again"
    )
