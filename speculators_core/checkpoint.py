"""Speculator directories in and out: safetensors, complete or absent.

A directory is written beside its place under a hidden name and renamed into it, so one that
exists is complete. Reading checks every tensor's name, shape, finiteness and the vocabulary map
before anything is built from it: vLLM would serve many broken files without a word.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculators_core.config import Eagle3Config
from speculators_core.errors import CheckpointError, Conflict, Unavailable
from speculators_core.models.eagle3 import Eagle3Draft

SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}
_PIECE = 1 << 22  # elements that are cast and checked at once


@contextmanager
def complete_or_absent(directory: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A fresh directory to write into; it becomes `directory` only when the block ends well."""
    if directory.exists() and not overwrite:
        raise Conflict(
            "the output exists already",
            where=str(directory),
            hint="choose another output, or remove this one",
        )
    token = uuid.uuid4().hex[:8]
    draft = directory.parent / f".{directory.name}.{token}.partial"
    old = directory.parent / f".{directory.name}.{token}.old"
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir()
    except OSError as error:
        raise Unavailable(
            f"the output can't be written: {error.strerror}",
            where=str(directory),
            hint="choose a place that you may write to",
        ) from error
    try:
        yield draft
        if overwrite and directory.exists():
            directory.rename(old)
        try:
            draft.rename(directory)
        except OSError as error:
            raise Conflict(
                f"the output appeared while it was being written: {error.strerror}",
                where=str(directory),
                hint="two jobs write to one place: choose another output",
            ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


@dataclass(frozen=True)
class Pending:
    """A tensor that is yet to be written: where it goes, and where it comes from."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


def write_safetensors(file: Path, tensors: Iterable[Pending]) -> Iterator[str]:
    """Write a safetensors file one tensor at a time; yields each name once it is written.

    Values are cast and checked piece by piece, so that memory stays small however large a tensor
    is. Raises `CheckpointError` at a NaN or an infinity (also one that the cast makes).
    """
    # widest items first: every tensor then starts at a multiple of its item size
    ordered = sorted(tensors, key=lambda t: (-t.dtype.itemsize, t.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for t in ordered:
        end = offset + math.prod(t.shape) * t.dtype.itemsize
        header[t.name] = {
            "dtype": SAFETENSORS_DTYPES[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for t in ordered:
            for piece in torch.split(t.read().reshape(-1), _PIECE):
                values = piece.to(t.dtype)
                if not all_finite(values):
                    raise CheckpointError(
                        f"tensor {t.name} holds NaN or infinity as {t.dtype}",
                        where=t.name,
                        hint="the source file is damaged, or was trained to overflow",
                    )
                out.write(values.contiguous().view(torch.uint8).numpy().data)
            yield t.name


def save_speculator(draft: Eagle3Draft, directory: Path, *, overwrite: bool = False) -> None:
    """Write config.json and model.safetensors in the dtype that the config names."""
    dtype = getattr(torch, draft.config.dtype)
    tensors = {
        name: (t.to(dtype) if t.is_floating_point() else t).detach().cpu().contiguous()
        for name, t in draft.state_dict().items()
    }
    with complete_or_absent(directory, overwrite=overwrite) as partial:
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "config.json").write_text(draft.config.to_json(), encoding="utf-8")


def load_speculator(
    directory: str | Path,
    *,
    embedding: Tensor | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Eagle3Draft:
    """Load a speculators-format EAGLE-3 directory.

    `embedding` [V, Hd] is the verifier's table, used where the file carries none (and shared, not
    copied). `dtype` None keeps the file's. Raises `CheckpointError` naming the tensor at fault.
    """
    directory = Path(directory)
    config = Eagle3Config.load(directory)
    file = directory / "model.safetensors"
    if not file.exists():
        raise CheckpointError("model.safetensors is missing", where=str(directory))
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"model.safetensors can't be read: {error}",
            where=str(file),
            hint="the file is damaged or incomplete: copy or convert it again",
        ) from error
    if "embed_tokens.weight" not in tensors and embedding is not None:
        tensors["embed_tokens.weight"] = embedding
    check_tensors(tensors, config, file)
    draft = Eagle3Draft(config)
    target = dtype or getattr(torch, config.dtype)
    tensors = {n: t.to(target) if t.is_floating_point() else t for n, t in tensors.items()}
    draft.load_state_dict(tensors, strict=True, assign=True)
    draft.embed_tokens.weight.requires_grad = config.embed_requires_grad
    return draft.to(device).eval()


def check_tensors(tensors: dict[str, Tensor], config: Eagle3Config, file: Path) -> None:
    """Raise `CheckpointError` unless names, shapes, values and the vocabulary map are right."""
    expected = config.tensor_shapes()
    hint = "convert the checkpoint again, or ask where it came from"
    for name in sorted(expected.keys() - tensors.keys()):
        raise CheckpointError(f"tensor {name} is missing", where=f"{file}: {name}", hint=hint)
    for name in sorted(tensors.keys() - expected.keys()):
        raise CheckpointError(
            f"tensor {name} has no place in this draft", where=f"{file}: {name}", hint=hint
        )
    for name, shape in expected.items():
        found = tuple(tensors[name].shape)
        if found != shape:
            raise CheckpointError(
                f"tensor {name} has shape {list(found)}, expected {list(shape)}",
                where=f"{file}: {name}",
                hint=hint,
            )
        if not all_finite(tensors[name]):
            raise CheckpointError(
                f"tensor {name} holds NaN or infinity", where=f"{file}: {name}", hint=hint
            )
    if config.has_vocab_map:
        check_vocab_map(tensors["d2t"], tensors["t2d"], where=str(file))


def all_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite. One pass without copies: `aminmax` hands on a NaN."""
    if not values.is_floating_point() or values.numel() == 0:
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(values))).all())


def check_vocab_map(d2t: Tensor, t2d: Tensor, *, where: str) -> None:
    """Raise unless the offsets `d2t` [dv] point at exactly the true rows of `t2d` [V]."""
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        raise CheckpointError(
            f"d2t is {d2t.dtype} and t2d {t2d.dtype}, expected torch.int64 and torch.bool",
            where=where,
            hint="convert the checkpoint again",
        )
    ids = torch.arange(len(d2t)) + d2t
    if bool((ids < 0).any()) or bool((ids >= len(t2d)).any()):
        raise CheckpointError(
            f"d2t points outside the verifier's vocabulary of {len(t2d)}: "
            f"ids from {int(ids.min())} to {int(ids.max())}",
            where=f"{where}: d2t",
            hint="d2t holds offsets (verifier id = i + d2t[i]); this file may hold absolute ids",
        )
    named = len(set(ids.tolist()))
    if int(t2d.sum()) != len(d2t) or named != len(d2t) or not bool(t2d[ids].all()):
        raise CheckpointError(
            f"t2d keeps {int(t2d.sum())} tokens, d2t names {named} in {len(d2t)} places; "
            "they must be the same",
            where=f"{where}: t2d",
            hint="one of the two maps belongs to another draft",
        )
