"""A checkpoint directory as it was found: its config and the name, dtype and shape of each tensor.

Light: safetensors headers are read here with struct and json; the tensors of a pickle are listed
by a child process (`pickled.py`), so that neither torch nor a hostile file comes near the reader.
"""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculators_core.config import read_json
from speculators_core.errors import CheckpointError, NotFound
from speculators_core.models.hub import is_hub_id, snapshot

_ITEM_SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_HEADER_LIMIT = 100_000_000  # bytes; the limit of the safetensors library itself
_PICKLE_SECONDS = 120
_FILES = ("*.json", "*.safetensors", "*.bin")  # of a checkpoint on the hub

Listed = tuple[str, str, Sequence[int]]
"""Name, dtype and shape of one tensor."""
ListPickle = Callable[[Path], list[Listed]]


@dataclass(frozen=True)
class TensorInfo:
    """One tensor in a file. `dtype` in torch's words: float16, int64, bool, …"""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path


@dataclass(frozen=True)
class Source:
    """What a checkpoint directory holds."""

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    pickled: bool

    @property
    def files(self) -> list[Path]:
        return sorted({info.file for info in self.tensors.values()})


def locate(checkpoint: str | Path) -> Path:
    """The directory of a checkpoint that is a path or a hub id (downloaded, weights and JSON)."""
    path = Path(checkpoint).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(
            "the checkpoint is a file; a directory with config.json and weights is expected",
            where=str(path),
            hint=f"give its directory: {path.parent}",
        )
    if not is_hub_id(str(checkpoint)):
        raise NotFound(
            "there is no such checkpoint directory",
            where=str(checkpoint),
            hint="give a directory, or a hub id such as org/name",
        )
    return snapshot(str(checkpoint), _FILES)


def open_source(checkpoint: str | Path, list_pickle: ListPickle | None = None) -> Source:
    """Read config and tensor headers. Raises `CheckpointError` where the directory is no
    checkpoint or a file is damaged. Who has torch at hand passes `pickled.list_tensors`, which
    saves starting a process for a pickle.
    """
    list_pickle = list_pickle or _list_in_child
    directory = locate(checkpoint)
    config = read_json(directory / "config.json")
    for index, single, pickled in (
        ("model.safetensors.index.json", "model.safetensors", False),
        ("pytorch_model.bin.index.json", "pytorch_model.bin", True),
    ):
        files = _weight_files(directory, index, single)
        if files:
            infos: dict[str, TensorInfo] = {}
            for file in files:
                listed = _pickle_headers(file, list_pickle) if pickled else read_headers(file)
                infos |= {info.name: info for info in listed}
            return Source(directory, config, infos, pickled)
    found = ", ".join(sorted(p.name for p in directory.iterdir())[:8])
    raise CheckpointError(
        "no weights found: expected model.safetensors or pytorch_model.bin, "
        f"found {found or 'nothing'}",
        where=str(directory),
        hint="is the download complete?",
    )


def _weight_files(directory: Path, index: str, single: str) -> list[Path]:
    if (directory / single).exists():
        return [directory / single]
    if not (directory / index).exists():
        return []
    names = read_json(directory / index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError("the index names no files", where=str(directory / index))
    files = []
    for name in sorted({str(value) for value in names.values()}):
        file = directory / name
        if Path(name).name != name or not file.exists():
            raise CheckpointError(
                f"the index names {name!r}, which is not here",
                where=str(directory / index),
                hint="is the download complete?",
            )
        files.append(file)
    return files


def read_headers(file: Path) -> Iterator[TensorInfo]:
    """The tensors that a safetensors file declares, its sizes checked against the file's."""
    size = file.stat().st_size
    with file.open("rb") as f:
        start = f.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= min(_HEADER_LIMIT, size - 8):
            raise _damaged(file, f"its header should be {length} bytes, the file has {size}")
        try:
            header = json.loads(f.read(length))
            entries = {n: e for n, e in header.items() if n != "__metadata__"}
            ends = [8 + length + _end_of(entry) for entry in entries.values()]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _damaged(file, f"its header is not valid ({type(error).__name__})") from error
    if ends and max(ends) != size:
        raise _damaged(file, f"its header describes {max(ends)} bytes, the file has {size}")
    for name, entry in entries.items():
        dtype = _NAMES.get(entry["dtype"], str(entry["dtype"]))
        yield TensorInfo(name, dtype, tuple(entry["shape"]), file)


def _end_of(entry: dict[str, Any]) -> int:
    start, end = entry["data_offsets"]
    if any(type(n) is not int or n < 0 for n in (start, end, *entry["shape"])):
        raise ValueError("not a size")
    if end - start != math.prod(entry["shape"]) * _ITEM_SIZES[entry["dtype"]]:
        raise ValueError("shape and bytes differ")
    return int(end)


def _damaged(file: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{file.name} is damaged or incomplete: {why}",
        where=str(file),
        hint="copy or download it again",
    )


def _pickle_headers(file: Path, list_pickle: ListPickle) -> Iterator[TensorInfo]:
    for name, dtype, shape in list_pickle(file):
        yield TensorInfo(name, dtype, tuple(shape), file)


def _list_in_child(file: Path) -> list[Listed]:
    command = [sys.executable, "-P", "-m", "speculators_core.conversion.pickled", str(file)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PICKLE_SECONDS)
        reply = json.loads(done.stdout)
    except subprocess.TimeoutExpired as error:
        raise _damaged(file, f"reading its contents took over {_PICKLE_SECONDS} s") from error
    except ValueError as error:
        raise _damaged(file, f"reading its contents failed (exit {done.returncode})") from error
    if "error" in reply:
        raise CheckpointError(reply["error"], where=str(file), hint=reply["hint"])
    tensors: list[Listed] = reply["tensors"]
    return tensors
