"""Speculator directories in and out: safetensors, complete or absent.

A directory is written beside its place under a hidden name and renamed into it, so one that
exists is complete. Reading checks every tensor's name, shape, finiteness and the vocabulary map
before anything is built from it: vLLM would serve many broken files without a word.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculators_core.config import Eagle3Config
from speculators_core.errors import CheckpointError, Conflict
from speculators_core.models.eagle3 import Eagle3Draft


@contextmanager
def complete_or_absent(directory: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A fresh directory to write into; it becomes `directory` only when the block ends well."""
    if directory.exists() and not overwrite:
        raise Conflict(
            "the output exists already",
            where=str(directory),
            hint="choose another output, or remove this one",
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    draft = directory.parent / f".{directory.name}.{uuid.uuid4().hex[:8]}.partial"
    draft.mkdir()
    try:
        yield draft
        if directory.exists():
            shutil.rmtree(directory)
        draft.rename(directory)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


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
    with torch.device("meta"):
        expected = dict(Eagle3Draft(config).state_dict())
    if "embed_tokens.weight" not in tensors and embedding is not None:
        tensors["embed_tokens.weight"] = embedding
    check_tensors(tensors, {n: tuple(t.shape) for n, t in expected.items()}, config, file)
    draft = Eagle3Draft(config)
    target = dtype or getattr(torch, config.dtype)
    tensors = {n: t.to(target) if t.is_floating_point() else t for n, t in tensors.items()}
    draft.load_state_dict(tensors, strict=True, assign=True)
    draft.embed_tokens.weight.requires_grad = config.embed_requires_grad
    return draft.to(device).eval()


def check_tensors(
    tensors: dict[str, Tensor],
    expected: dict[str, tuple[int, ...]],
    config: Eagle3Config,
    file: Path,
) -> None:
    """Raise `CheckpointError` unless names, shapes, values and the vocabulary map are right."""
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
        if tensors[name].is_floating_point() and not torch.isfinite(tensors[name]).all():
            raise CheckpointError(
                f"tensor {name} holds NaN or infinity", where=f"{file}: {name}", hint=hint
            )
    if config.has_vocab_map:
        check_vocab_map(tensors["d2t"], tensors["t2d"], where=str(file))


def check_vocab_map(d2t: Tensor, t2d: Tensor, *, where: str) -> None:
    """Raise unless the offsets `d2t` [dv] point at exactly the true rows of `t2d` [V]."""
    ids = torch.arange(len(d2t)) + d2t
    if bool((ids < 0).any()) or bool((ids >= len(t2d)).any()):
        raise CheckpointError(
            f"d2t points outside the verifier's vocabulary of {len(t2d)}: "
            f"ids from {int(ids.min())} to {int(ids.max())}",
            where=f"{where}: d2t",
            hint="d2t holds offsets (verifier id = i + d2t[i]); this file may hold absolute ids",
        )
    if int(t2d.sum()) != len(d2t) or not bool(t2d[ids].all()):
        raise CheckpointError(
            f"t2d keeps {int(t2d.sum())} tokens and d2t names {len(d2t)}; they must be the same",
            where=f"{where}: t2d",
            hint="one of the two maps belongs to another draft",
        )
