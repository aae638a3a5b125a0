"""Speculator directories in and out: safetensors, complete or absent.

Reading checks every tensor's name, shape, finiteness and the vocabulary map before anything is
built from it: vLLM would serve many broken files without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculators_core.config import Eagle3Config
from speculators_core.errors import CheckpointError
from speculators_core.models.eagle3 import Eagle3Draft
from speculators_core.output import complete_or_absent
from speculators_core.vocabulary import check_vocab_map
from speculators_core.weights import SINGLE, check_shapes, not_finite, weight_files

EMBEDDING = "embed_tokens.weight"
"""The one tensor that a file may leave out: its verifier's is used."""


def save_speculator(
    draft: Eagle3Draft,
    directory: Path,
    *,
    overwrite: bool = False,
    beside: Mapping[str, str] | None = None,
) -> None:
    """Write config.json and model.safetensors in the dtype that the config names; the embedding
    unless it is the verifier's own. `beside` are further texts by the names of their files."""
    dtype = getattr(torch, draft.config.dtype)
    tensors = {
        name: (t.to(dtype) if t.is_floating_point() else t).detach().cpu().contiguous()
        for name, t in draft.state_dict().items()
        if not (name == EMBEDDING and draft.shares_embedding)
    }
    with complete_or_absent(directory, overwrite=overwrite) as partial:
        save_file(tensors, partial / SINGLE, metadata={"format": "pt"})
        for name, text in {"config.json": draft.config.to_json(), **(beside or {})}.items():
            (partial / name).write_text(text, encoding="utf-8")


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
    tensors = _load_files(directory)
    shared = EMBEDDING not in tensors and embedding is not None
    if shared and embedding is not None:
        tensors[EMBEDDING] = embedding
    check_tensors(tensors, config, directory / SINGLE)
    draft = Eagle3Draft(config)
    target = dtype or getattr(torch, config.dtype)
    tensors = {n: t.to(target) if t.is_floating_point() else t for n, t in tensors.items()}
    draft.load_state_dict(tensors, strict=True, assign=True)
    draft.embed_tokens.weight.requires_grad = config.embed_requires_grad
    draft.shares_embedding = shared
    return draft.to(device).eval()


def _load_files(directory: Path) -> dict[str, Tensor]:
    files = weight_files(directory)
    if not files:
        raise CheckpointError(f"{SINGLE} is missing", where=str(directory))
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{file.name} can't be read: {error}",
                where=str(file),
                hint="the file is damaged or incomplete: copy or convert it again",
            ) from error
    return tensors


def check_tensors(tensors: dict[str, Tensor], config: Eagle3Config, file: Path) -> None:
    """Raise `CheckpointError` unless names, shapes, values and the vocabulary map are right."""
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    check_shapes(found, config.tensor_shapes(), file)
    for name, tensor in tensors.items():
        if not all_finite(tensor):
            raise not_finite(name, file)
    if config.has_vocab_map:
        check_vocab_map(tensors["d2t"].numpy(), tensors["t2d"].numpy(), where=str(file))


def all_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite. One pass without copies: `aminmax` hands on a NaN."""
    if not values.is_floating_point() or values.numel() == 0:
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(values))).all())
