"""A checkpoint directory as it was found: its config, its tensors, and their bytes a piece at a
time.

Light: headers are read with struct and json, bytes as bytes; a pickle is read by another process
(`child.py`), so that neither torch nor a hostile file comes near the reader.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speculators_core.conversion.child import PickledWeights
from speculators_core.conversion.header import TensorInfo, read_headers
from speculators_core.errors import CheckpointError
from speculators_core.model_config import read_model_config
from speculators_core.models.hub import bring_checkpoint
from speculators_core.precision import Raw
from speculators_core.untrusted import check_links, open_regular
from speculators_core.weights import weight_files

_PICKLED = "pytorch_model.bin"
_PIECE = 1 << 18  # bytes read at once: looked at and written while they are in the L2 cache


@dataclass(frozen=True)
class Source:
    """What a checkpoint directory holds."""

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    pickled: PickledWeights | None
    unread: str | None = None
    """Other weights in the same directory, which were passed over."""

    @property
    def files(self) -> list[Path]:
        return sorted({info.file for info in self.tensors.values()})

    def pieces(self, name: str) -> Iterator[Raw]:
        """A tensor's bytes in order, a few MB at most at once; each piece is overwritten by the
        next. Raises `CheckpointError` where the file has become shorter.
        """
        info = self.tensors[name]
        return self.pickled.pieces(info) if self.pickled else _pieces(info)

    def values(self, name: str, limit: int) -> Raw:
        """All bytes of a small tensor. Raises `CheckpointError` above `limit` values."""
        info = self.tensors[name]
        if math.prod(info.shape) > limit:
            raise CheckpointError(
                f"tensor {name} has shape {list(info.shape)}, more than {limit} values",
                where=f"{info.file}: {name}",
                hint="config.json and tensors disagree: do they belong together?",
            )
        return np.concatenate([np.empty(0, np.uint8), *(p.copy() for p in self.pieces(name))])


def open_source(checkpoint: str | Path, roots: Sequence[Path] | None = None) -> Source:
    """Read config and tensor headers. Raises `CheckpointError` where the directory is no
    checkpoint or a file is damaged, `Forbidden` where a file is a link out of `roots` (None: links
    may lead anywhere).
    """
    directory = bring_checkpoint(checkpoint)
    if roots is not None:
        check_links(directory, roots)
    config = read_model_config(directory)
    if places := weight_files(directory):
        unread = next((p.name for p in directory.glob(f"{_PICKLED}*")), None)
        return Source(directory, config, _by_name(_headers(places), places), None, unread)
    if places := weight_files(directory, _PICKLED):
        child = PickledWeights(list(places))
        return Source(directory, config, _by_name(child.infos, places), child)
    found_names = ", ".join(sorted(p.name for p in directory.iterdir())[:8])
    raise CheckpointError(
        "no weights found: expected model.safetensors or pytorch_model.bin, "
        f"found {found_names or 'nothing'}",
        where=str(directory),
        hint="is the download complete?",
    )


def _headers(files: Iterable[Path]) -> Iterator[TensorInfo]:
    for file in files:
        yield from read_headers(file)


def _by_name(infos: Iterable[TensorInfo], places: dict[Path, set[str]]) -> dict[str, TensorInfo]:
    named: dict[str, TensorInfo] = {}
    for info in infos:
        other = named.setdefault(info.name, info)
        if other is not info:
            raise CheckpointError(
                f"tensor {info.name} is in {other.file.name} and in {info.file.name}",
                where=f"{info.file}: {info.name}",
                hint="was the checkpoint merged from two?",
            )
    for file, expected in places.items():
        for name in sorted(expected):
            if name not in named or named[name].file != file:
                raise CheckpointError(
                    f"the index says that {name} is in {file.name}, where it is not",
                    where=f"{file}: {name}",
                    hint="is the download complete?",
                )
    return named


def _pieces(info: TensorInfo) -> Iterator[Raw]:
    assert info.start is not None
    buffer, left = np.empty(min(_PIECE, info.nbytes), np.uint8), info.nbytes
    with open_regular(info.file) as file:
        file.seek(info.start)
        while left:
            piece = buffer[:left]
            if file.readinto(piece.data) != piece.size:
                raise CheckpointError(
                    f"{info.file.name} ends within tensor {info.name}",
                    where=str(info.file),
                    hint="did it change while it was read?",
                )
            left -= piece.size
            yield piece
