"""What a safetensors file declares: name, dtype, shape and place of each tensor, checked.

The rules are those of the safetensors library (no gap, no overlap, nothing beyond the end), plus
bounds on what a reader will look at: a header is read before anything in the file is trusted.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculators_core.errors import CheckpointError
from speculators_core.precision import NAMES, SIZES
from speculators_core.untrusted import JSON_BYTES, open_regular, parse_json

_RANK = 8
_NAME = 512  # characters
_FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor in a file. `dtype` in torch's words: float16, int64, bool, …; `start` is the
    offset of its first byte, None in a pickle.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]


def read_headers(file: Path) -> Iterator[TensorInfo]:
    """The tensors of a safetensors file; what they declare fills the file exactly.

    Raises `CheckpointError`; takes milliseconds however large the file is.
    """
    with open_regular(file) as f:
        size = f.seek(0, 2)
        f.seek(0)
        start = f.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= size - 8:
            raise damaged(file, f"its header should be {length} bytes, the file has {size}")
        if length > JSON_BYTES:
            raise damaged(file, f"its header of {length} bytes is larger than {JSON_BYTES}")
        text = f.read(length)
    try:
        infos = _tensors(text, file, 8 + length)
    except ValueError as error:
        raise damaged(file, f"its header is not valid: {error}") from error
    _check_places(infos, file, 8 + length, size)
    yield from infos


def damaged(file: Path, why: str) -> CheckpointError:
    """The error of a file that is not what its writer wrote."""
    return CheckpointError(
        f"{file.name} is damaged or incomplete: {why}",
        where=str(file),
        hint="copy or download it again",
    )


def _tensors(text: bytes, file: Path, data: int) -> list[TensorInfo]:
    """In the order of their bytes, which begin at offset `data`."""
    header = parse_json(text)
    if not isinstance(header, dict):
        raise ValueError(f"it should be an object, found {type(header).__name__}")
    header.pop("__metadata__", None)
    infos = [_tensor(name, entry, file, data) for name, entry in header.items()]
    return sorted(infos, key=lambda info: (info.start or 0, info.nbytes))


def _tensor(name: str, entry: Any, file: Path, data: int) -> TensorInfo:
    if len(name) > _NAME:
        raise ValueError(f"a tensor's name has {len(name)} characters")
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise ValueError(f"{name} should have {', '.join(sorted(_FIELDS))}")
    dtype = NAMES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise ValueError(f"{name} has the unknown dtype {str(entry['dtype'])[:40]!r}")
    shape, places = _sizes(name, entry["shape"]), _sizes(name, entry["data_offsets"])
    info = TensorInfo(name, dtype, shape, file, data + places[0] if places else None)
    if len(places) != 2 or places[1] - places[0] != info.nbytes:
        raise ValueError(f"{name} of shape {list(shape)} does not fill its bytes {list(places)}")
    return info


def _sizes(name: str, numbers: Any) -> tuple[int, ...]:
    if not isinstance(numbers, list) or len(numbers) > _RANK:
        raise ValueError(f"{name} should have lists of at most {_RANK} sizes")
    if any(type(n) is not int or not 0 <= n < 1 << 63 for n in numbers):
        raise ValueError(f"{name} has sizes that are none")
    return tuple(numbers)


def _check_places(infos: list[TensorInfo], file: Path, data: int, size: int) -> None:
    end = data
    for info in infos:
        if info.start != end:
            what = "a gap before" if (info.start or 0) > end else "an overlap at"
            raise damaged(file, f"its header is not valid: there is {what} {info.name}")
        end += info.nbytes
    if end != size:
        raise damaged(file, f"its header describes {end} bytes, the file has {size}")
