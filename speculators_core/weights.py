"""Weights on disk: safetensors files found, and written a piece at a time, whole or in shards.

Light: no torch.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from speculators_core.config import read_json
from speculators_core.errors import CheckpointError
from speculators_core.precision import CODES, SIZES, Raw, all_finite
from speculators_core.untrusted import is_pointer

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_NAME = 255  # bytes; no file system takes more


def weight_files(directory: Path, single: str = SINGLE) -> dict[Path, set[str]]:
    """Each file of weights in a directory, with the tensors that an index says are in it; none
    where there are no weights. Raises `CheckpointError` where the index names what is not here, a
    whole file and shards lie side by side, or Git LFS has not fetched a file.
    """
    whole, index = directory / single, directory / f"{single}.index.json"
    files = _indexed(index) if index.exists() else {whole: set()} if whole.exists() else {}
    if whole.exists() and files.keys() != {whole}:
        raise CheckpointError(
            f"the directory holds two sets of weights: {single}, and what {index.name} names "
            f"({', '.join(file.name for file in list(files)[:3])})",
            where=str(directory),
            hint="readers differ in which they take: remove one of the two",
        )
    check_fetched(files)
    return files


def check_fetched(files: Iterable[Path]) -> None:
    """Raise `CheckpointError` where a file is only a pointer that Git LFS left in its place."""
    for file in files:
        if is_pointer(file):
            raise CheckpointError(
                f"{file.name} is a pointer of Git LFS: the file itself was never fetched",
                where=str(file),
                hint="in this directory: git lfs install, then git lfs pull",
            )


def _indexed(index: Path) -> dict[Path, set[str]]:
    """The files that an index names, each with its tensors."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(
            "the index names no files: its weight_map should be an object of tensor to file",
            where=str(index),
            hint="is the download complete?",
        )
    files: dict[Path, set[str]] = {}
    for tensor, name in sorted(names.items(), key=lambda item: str(item[1])):
        if not isinstance(name, str) or Path(name).name != name or len(name.encode()) > _NAME:
            raise _not_here(name, index)
        files.setdefault(index.parent / name, set()).add(tensor)
    for file in files:
        if not file.exists():
            raise _not_here(file.name, index)
    return files


def check_shapes(
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    where: Path,
    lent: Set[str] = frozenset(),
) -> None:
    """Raise `CheckpointError` unless the tensors in `where` have the names and shapes that the
    config implies; those in `lent` may be missing.
    """
    for name in sorted((expected.keys() ^ found.keys()) - (lent - found.keys())):
        known = "is missing" if name in expected else "has no place in this draft"
        raise _wrong(name, known, where)
    for name, shape in found.items():
        if shape != expected[name]:
            raise _wrong(name, f"has shape {list(shape)}, expected {list(expected[name])}", where)


def not_finite(name: str, where: Path) -> CheckpointError:
    """The error that a tensor in `where` holds NaN or infinity."""
    return _wrong(name, "holds NaN or infinity", where)


def _wrong(name: str, why: str, where: Path) -> CheckpointError:
    return CheckpointError(
        f"tensor {name} {why}",
        where=f"{where}: {name}",
        hint="convert the checkpoint again, or ask where it came from",
    )


def _not_here(name: object, index: Path) -> CheckpointError:
    return CheckpointError(
        f"the index names {str(name)[:200]!r}, which is not here",
        where=str(index),
        hint="is the download complete?",
    )


@dataclass(frozen=True)
class Pending:
    """A tensor that is yet to be written. `pieces` gives its bytes in order, already as `dtype`;
    a piece may be overwritten once the next one is asked for.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: Callable[[], Iterable[Raw]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]


def write_weights(
    directory: Path, tensors: Iterable[Pending], max_shard_bytes: int | None = None
) -> Iterator[str]:
    """Write `model.safetensors`, or shards and their index; yields each name once it is written.

    A tensor is never divided: one larger than `max_shard_bytes` has a shard of its own. Raises
    `CheckpointError` at a NaN or an infinity, whose bytes are looked at on their way.
    """
    shards = _shards(sorted(tensors, key=lambda t: t.name), max_shard_bytes)
    if len(shards) == 1:
        yield from write_safetensors(directory / SINGLE, shards[0])
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        places |= {tensor.name: file for tensor in shard}
        yield from write_safetensors(directory / file, shard)
    total = sum(tensor.nbytes for shard in shards for tensor in shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_safetensors(file: Path, tensors: Sequence[Pending]) -> Iterator[str]:
    """One file of `write_weights`."""
    # widest items first: every tensor then starts at a multiple of its item size
    ordered = sorted(tensors, key=lambda t: (-SIZES[t.dtype], t.name))
    with file.open("wb", buffering=0) as out:
        out.write(_header(ordered))
        for tensor in ordered:
            _write(out, tensor)
            yield tensor.name


def _shards(tensors: Sequence[Pending], limit: int | None) -> list[list[Pending]]:
    shards: list[list[Pending]] = [[]]
    filled = 0
    for tensor in tensors:
        if limit is not None and shards[-1] and filled + tensor.nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    return shards


def _header(tensors: Sequence[Pending]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write(out: BinaryIO, tensor: Pending) -> None:
    written = 0
    for piece in tensor.pieces():
        if not all_finite(piece, tensor.dtype):
            raise CheckpointError(
                f"tensor {tensor.name} holds NaN or infinity as {tensor.dtype}",
                where=tensor.name,
                hint="the source file is damaged, or was trained to overflow",
            )
        left = piece.data
        while left:
            left = left[out.write(left) :]
        written += piece.size
    if written != tensor.nbytes:
        raise CheckpointError(
            f"tensor {tensor.name} has {written} bytes, its shape needs {tensor.nbytes}",
            where=tensor.name,
            hint="did the source file change while it was read?",
        )
