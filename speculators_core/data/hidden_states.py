"""The verifier's states of a prepared data set, cached on disk.

    DIR/{first}-{last}.safetensors   documents first..last of the data set, one after the other:
        aux    [T, n_aux*H]   states after the aux layers, ascending, concatenated
        final  [T, H]         state after the last layer, before the final norm
        best   [T] int32      the verifier's first choice for the next token, where that token is
                              trained on; -1 elsewhere
        ids    [T] int32      the tokens they belong to
        lengths [D] int64,  sound [D] bool (false: quarantined, its states were not finite)
    DIR/in-use                locked by every process that reads the cache (`occupancy`)

A file holds documents of at most `TOKENS_A_FILE` tokens, or one longer document. Its header names
layers, convention ("after k layers"), that `final` is not normed, the verifier, the dtype and the
data, and is checked at every opening: states of another verifier are refused. Files are written
beside their place and renamed, so a run that was stopped continues where it was; a damaged file is
made again.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from speculators_core.data import capacity
from speculators_core.data.occupancy import occupy, tell
from speculators_core.data.prepare import Prepared
from speculators_core.data.states import StateProducer, States
from speculators_core.errors import DataError, PairingError, Stopped, Unavailable
from speculators_core.progress import Progress, Quiet

FORMAT = "speclab hidden states 2"
TOKENS_A_FILE = 8192
QUARANTINE_LIMIT = 0.05
_OPEN_FILES = 64  # mapped at once: a large cache has more than a process may open
_ABANDONED_S = 3600.0  # after which a half-written file has no writer any more
_KEPT = ("aux", "final", "best")


@dataclass(frozen=True)
class _File:
    """One file of a cache: documents `first` to before `end`."""

    path: Path
    first: int
    end: int
    tokens: int


@dataclass
class StateCache:
    """Reads states of single documents from the files of a directory; memory-mapped. As long as
    it is there, nobody cleans the directory up."""

    prepared: Prepared
    header: dict[str, str]
    files: list[_File]
    lock: IO[bytes]
    quarantined: set[int] = field(default_factory=set)
    _open: OrderedDict[int, tuple[Any, Tensor]] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self._firsts = [file.first for file in self.files]
        self._lengths: list[int] = self.prepared.lengths.tolist()

    def states(self, document: int) -> States:
        number = bisect_right(self._firsts, document) - 1
        file, starts = self._opened(number)
        start = int(starts[document - self._firsts[number]])
        rows = slice(start, start + self._lengths[document])
        return States(*(file.get_slice(name)[rows] for name in _KEPT))

    def _opened(self, number: int) -> tuple[Any, Tensor]:
        if number not in self._open:
            file = safe_open(self.files[number].path, framework="pt")
            lengths: Tensor = file.get_tensor("lengths")  # type: ignore[no-untyped-call]
            self._open[number] = file, lengths.cumsum(0) - lengths
            if len(self._open) > _OPEN_FILES:
                self._open.popitem(last=False)
        self._open.move_to_end(number)
        return self._open[number]


def cache_states(
    prepared: Prepared,
    producer: StateProducer,
    directory: Path,
    progress: Progress | None = None,
    *,
    dtype: str = "auto",
) -> StateCache:
    """Let `producer` compute what the cache at `directory` lacks, and open it.

    `dtype` is what states are kept in, by itself what they are computed in. Raises `PairingError`
    where the directory holds another verifier's states, `Unavailable` where the disk has no room
    (before anything is computed), `DataError` where more than 5 % of the documents give non-finite
    states or states do not fit float16.
    """
    progress = progress or Quiet()
    header = expected_header(prepared, producer, dtype)
    lock = occupy(directory, {**header, **_told(producer)})
    files = _plan(directory, prepared)
    _sweep(directory)
    missing = [file for file in files if not _usable(file, prepared, header, progress)]
    _check_room(missing, producer, header["dtype"], directory, progress)
    count = len(prepared.lengths)
    lacking = {file.first for file in missing}
    quarantined = _quarantined([file for file in files if file.first not in lacking])
    clock = _Clock(missing)
    for file in missing:
        check_quarantined(len(quarantined), count, str(directory))  # not only at the end
        if progress.stopping():
            raise Stopped("stopped while hidden states were made; those made so far are kept")
        _make(file, prepared, producer, header, progress)
        quarantined |= _quarantined([file])
        clock.tell(file, progress)
    check_quarantined(len(quarantined), count, str(directory))
    if missing:
        tell(directory, {**header, **_told(producer), "tokens_per_second": f"{clock.speed:.1f}"})
    if quarantined:
        progress.note(f"{len(quarantined)} of {count} documents are quarantined and not used")
    return StateCache(prepared, header, files, lock, quarantined)


def expected_header(
    prepared: Prepared, producer: StateProducer, dtype: str = "auto"
) -> dict[str, str]:
    """What the header of files of this data, verifier, precision and these layers must say."""
    computed_in = str(producer.verifier.model.dtype).removeprefix("torch.")
    return {
        "format": FORMAT,
        "layers": json.dumps(list(producer.layers)),
        "convention": "after",
        "final_normed": "false",
        "verifier": producer.verifier.fingerprint,
        "dtype": computed_in if dtype == "auto" else dtype,
        "computed_in": computed_in,
        "data": prepared.meta.key,
    }


def cache_key(header: dict[str, str]) -> str:
    """A short name for a cache directory: equal exactly where the header is."""
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()[:16]


def _plan(directory: Path, prepared: Prepared) -> list[_File]:
    """The files that hold all documents, in order."""
    lengths: list[int] = prepared.lengths.tolist()
    files: list[_File] = []
    first = tokens = 0
    for document, length in enumerate([*lengths, TOKENS_A_FILE + 1]):
        if document > first and tokens + length > TOKENS_A_FILE:
            path = directory / f"{first:07d}-{document - 1:07d}.safetensors"
            files.append(_File(path, first, document, tokens))
            first, tokens = document, 0
        tokens += length
    return files


def _sweep(directory: Path) -> None:
    """Remove what writers that died left half-written."""
    for partial in directory.glob("*.partial"):
        try:
            if time.time() - partial.stat().st_mtime > _ABANDONED_S:
                partial.unlink()
        except FileNotFoundError:
            continue


def _usable(file: _File, prepared: Prepared, header: dict[str, str], progress: Progress) -> bool:
    """Whether a file is whole and of this data; a damaged one is reported and made again."""
    name = file.path.name
    if not file.path.exists():
        return False
    try:
        with safe_open(file.path, framework="pt") as opened:
            found = opened.metadata() or {}
            ids, lengths = opened.get_tensor("ids"), opened.get_tensor("lengths")
            rows = [opened.get_slice(kept).get_shape()[0] for kept in _KEPT]
    except (SafetensorError, OSError) as error:
        progress.note(f"{name} is damaged and is made again: {error}")
        return False
    _check_header(found, header, file.path)
    expected = prepared.lengths[file.first : file.end]
    start = int(prepared.starts[file.first])
    tokens = prepared.ids[start : start + file.tokens]
    if not torch.equal(lengths, expected) or not torch.equal(ids, tokens):
        progress.note(f"{name} holds other tokens and is made again")
        return False
    if set(rows) != {len(ids)}:
        progress.note(f"{name} has {min(rows)} states for {len(ids)} tokens: made again")
        return False
    return True


def _check_header(found: dict[str, str], expected: dict[str, str], path: Path) -> None:
    for name, value in expected.items():
        if found.get(name) != value:
            raise PairingError(
                f"these states were made with another {name}: "
                f"found {found.get(name)!r}, expected {value!r}",
                where=str(path),
                hint="choose another cache directory, or remove this one",
            )


def _check_room(
    missing: list[_File],
    producer: StateProducer,
    dtype: str,
    directory: Path,
    progress: Progress,
) -> None:
    if not missing:
        return
    tokens = sum(file.tokens for file in missing)
    width, itemsize = producer.verifier.facts.hidden_size, capacity.ITEM_BYTES[dtype]
    need = capacity.states(tokens, len(producer.layers), width, itemsize)
    free = capacity.free_bytes(directory)
    estimate = capacity.Estimate(
        where=str(directory), free=free, needs=(need,), remedy=capacity.OF_STATES
    )
    for line in estimate.lines():
        progress.note(line)
    estimate.require()


class _Clock:
    """Fraction, speed and seconds left over the files to make."""

    def __init__(self, missing: list[_File]) -> None:
        self.total = sum(file.tokens for file in missing)
        self.done = 0
        self.began = time.monotonic()

    @property
    def speed(self) -> float:
        """Tokens a second so far, a server's start included."""
        return self.done / max(time.monotonic() - self.began, 1e-9)

    def tell(self, file: _File, progress: Progress) -> None:
        self.done += file.tokens
        progress.update(
            self.done / self.total,
            f"hidden states: {self.done} of {self.total} tokens, {self.speed:.0f} tokens/s",
            (self.total - self.done) / self.speed,
        )


def _make(
    file: _File,
    prepared: Prepared,
    producer: StateProducer,
    header: dict[str, str],
    progress: Progress,
) -> None:
    numbers = range(file.first, file.end)
    documents = [prepared.document(number) for number in numbers]
    found = producer.states(documents, progress.stopping)
    kept = [_checked(s, len(d[0]), n) for s, d, n in zip(found, documents, numbers, strict=True)]
    sound = [is_finite(states) for states in kept]
    for number, fine in zip(numbers, sound, strict=True):
        if not fine:
            progress.note(f"document {number} is quarantined: its states hold NaN or infinity")
    dtype = getattr(torch, header["dtype"])
    tensors = {
        "aux": _narrowed([states.aux for states in kept], dtype, file),
        "final": _narrowed([states.final for states in kept], dtype, file),
        "best": torch.cat([states.best for states in kept]).cpu(),
        "ids": torch.cat([ids for ids, _ in documents]).to(torch.int32),
        "lengths": torch.tensor([len(ids) for ids, _ in documents]),
        "sound": torch.tensor(sound),
    }
    partial = file.path.with_suffix(f".{uuid.uuid4().hex[:8]}.partial")  # two may share the cache
    try:
        save_file(tensors, partial, metadata={**header, **_told(producer)})
        partial.rename(file.path)
    except (OSError, SafetensorError) as error:
        raise Unavailable(
            f"the states of documents {file.first} to {file.end - 1} can't be written: {error}",
            where=str(file.path),
            hint="is the disk full? speclab caches shows what can go",
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def _told(producer: StateProducer) -> dict[str, str]:
    """What a person wants to know beside; states are the same whoever made them."""
    return {"made_by": producer.made_by, "model": Path(producer.verifier.facts.path).name}


def _checked(states: States, length: int, number: int) -> States:
    if not len(states.aux) == len(states.final) == len(states.best) == length:
        raise DataError(
            f"document {number} has {length} tokens, the verifier gave {len(states.final)} states"
        )
    return states


def is_finite(states: States) -> bool:
    """Whether no state is NaN or infinite."""
    return bool(torch.isfinite(states.aux).all() and torch.isfinite(states.final).all())


def _narrowed(parts: list[Tensor], dtype: torch.dtype, file: _File) -> Tensor:
    """All parts in the precision that is kept. Raises `DataError` where finite numbers would
    become infinite in it."""
    whole = torch.cat(parts).cpu()
    if dtype == torch.float16 and whole.dtype != torch.float16:
        largest = float(whole.nan_to_num(0.0, 0.0, 0.0).abs().max())
        if largest > torch.finfo(dtype).max:
            raise DataError(
                f"the verifier's states reach {largest:.0f}, float16 ends at "
                f"{torch.finfo(dtype).max:.0f} (documents {file.first} to {file.end - 1})",
                where="states_dtype",
                hint="keep them in bfloat16 or float32",
            )
    return whole.to(dtype)


def _quarantined(files: list[_File]) -> set[int]:
    result: set[int] = set()
    for file in files:
        with safe_open(file.path, framework="pt") as opened:
            unsound = (~opened.get_tensor("sound")).nonzero().flatten()
        result |= {file.first + int(i) for i in unsound}
    return result


def check_quarantined(quarantined: int, count: int, where: str) -> None:
    """Raise `DataError` where more of `count` documents are unusable than may be."""
    if quarantined > QUARANTINE_LIMIT * count:
        raise DataError(
            f"{quarantined} of {count} documents give NaN or infinite states "
            f"(at most {QUARANTINE_LIMIT:.0%} may)",
            where=where,
            hint="the verifier may overflow in this dtype: try float32 or bfloat16",
        )
