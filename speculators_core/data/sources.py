"""Where rows come from: files, directories and hub data sets, each with a weight.

A weight of 0.3 takes three rows of ten, 2 takes each row twice, 1.5 each once and every second one
again. Which rows those are is drawn from the seed, the source's place in the list and the row's
number alone, so a resumed preparation takes the same ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculators_core.data.rows import chosen_files, files_of, read_rows
from speculators_core.errors import DataError, SpeclabError, Unavailable
from speculators_core.hub.client import api, speaking
from speculators_core.hub.download import require_space
from speculators_core.hub.reference import HubId, is_hub_id, parse_hub_id
from speculators_core.params import PrepareParams
from speculators_core.progress import Progress, Quiet
from speculators_core.untrusted import is_here


@dataclass(frozen=True)
class Source:
    """Files in order, as one list of rows. `digest` is of their bytes, `stamps` of their times."""

    name: str
    files: tuple[Path, ...]
    weight: float
    digest: str
    stamps: tuple[tuple[int, int], ...]

    @property
    def changed(self) -> bool:
        """Whether a file was written to since its bytes were hashed."""
        return self.stamps != _stamps(self.files)

    @property
    def size(self) -> int:
        return sum(file.stat().st_size for file in self.files)


@dataclass(frozen=True)
class Taken:
    """A row that is wanted `copies` times (0: it is only counted). `number` counts the source's
    rows from 1 over all its files; `done` is the share of all sources that is read with it.
    """

    source: int
    number: int
    copies: int
    values: dict[str, Any]
    where: str
    done: float


def open_sources(params: PrepareParams, progress: Progress | None = None) -> list[Source]:
    """The sources of a preparation, hub data sets downloaded. Raises `DataError`."""
    weights = params.weights or (1.0,) * len(params.data)
    return [
        open_source(reference, params.split, weight, progress)
        for reference, weight in zip(params.data, weights, strict=True)
    ]


def open_source(
    reference: str,
    split: str | None = None,
    weight: float = 1.0,
    progress: Progress | None = None,
) -> Source:
    """One source, its bytes hashed. Raises `DataError` where nothing is there."""
    if not is_here(reference) and is_hub_id(reference):
        files = hub_files(parse_hub_id(reference), split, progress or Quiet())
    else:
        files = files_of(Path(reference).expanduser(), split)
    stamps = _stamps(files)  # before the bytes are read: what changes meanwhile is seen
    return Source(reference, tuple(files), weight, _digest(files), stamps)


def take(sources: Sequence[Source], seed: int) -> Iterator[Taken]:
    """Every row of every source, and how often it is wanted."""
    total = max(sum(source.size for source in sources), 1)
    before = 0
    for index, source in enumerate(sources):
        number = 0
        for file in source.files:
            size = file.stat().st_size
            for row in read_rows(file):
                number += 1
                yield Taken(
                    source=index,
                    number=number,
                    copies=_copies(source.weight, seed, index, number),
                    values=row.values,
                    where=f"{file}:{row.number}",
                    done=(before + row.done * size) / total,
                )
            before += size


def hub_files(hub_id: HubId, split: str | None, progress: Progress) -> list[Path]:
    """The files of a split of a data set of the hub, downloaded into the hub's own cache, or found
    there when the hub is away.
    """
    where = f"data set {hub_id}"
    try:
        with speaking(hub_id):
            info = api().dataset_info(hub_id.repository, revision=hub_id.revision)
            names = chosen_files([s.rfilename for s in info.siblings or ()], split, where)
            missing = _missing_bytes(hub_id, names)
    except Unavailable:
        here = _cached(hub_id)
        if here is None:
            raise
        return files_of(here, split or "train")
    if missing:
        from huggingface_hub import constants

        require_space(missing, Path(constants.HF_HUB_CACHE).expanduser())
        progress.update(None, f"downloading {len(names)} files of {where}")
    with speaking(hub_id):
        place = Path(
            api().snapshot_download(
                hub_id.repository,
                repo_type="dataset",
                revision=hub_id.revision,  # by its name, so that the cache knows it by that
                allow_patterns=names,
            )
        )
    return [place / name for name in names]


def _missing_bytes(hub_id: HubId, names: Sequence[str]) -> int:
    """Of those files that are not in the cache yet."""
    planned = api().snapshot_download(
        hub_id.repository,
        repo_type="dataset",
        revision=hub_id.revision,
        allow_patterns=list(names),
        dry_run=True,
    )
    return sum(file.file_size or 0 for file in planned if file.will_download)


def _cached(hub_id: HubId) -> Path | None:
    """The snapshot in the hub's cache; asks nobody."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(
            api().snapshot_download(
                hub_id.repository,
                repo_type="dataset",
                revision=hub_id.revision,
                local_files_only=True,
            )
        )
    except (LocalEntryNotFoundError, SpeclabError):
        return None


def _copies(weight: float, seed: int, source: int, number: int) -> int:
    """The whole part of the weight, and one more with the probability that is left."""
    whole, left = divmod(weight, 1.0)
    if not left:
        return int(whole)
    drawn = hashlib.blake2b(f"{seed}:{source}:{number}".encode(), digest_size=8).digest()
    return int(whole) + (int.from_bytes(drawn, "big") < left * 2**64)


def _stamps(files: Sequence[Path]) -> tuple[tuple[int, int], ...]:
    stamps = []
    for file in files:
        with _looking_at(file):
            found = file.stat()
        stamps.append((found.st_size, found.st_mtime_ns))
    return tuple(stamps)


@contextmanager
def _looking_at(file: Path) -> Iterator[None]:
    """What the system says of a file that can't be read, as a `DataError`."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(
            "the data file does not exist", where=str(file), hint="give the path of a data file"
        ) from None
    except OSError as error:
        raise DataError(f"the data can't be read: {error.strerror}", where=str(file)) from error


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with _looking_at(file), file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()
