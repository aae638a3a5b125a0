"""Pickled weights (`pytorch_model.bin`), read without running anything that they hold.

`load_pickled` is the only way in: torch's restricted unpickler builds tensors and plain
containers and refuses the rest. `python -m speculators_core.conversion.pickled FILE` lists the
tensors as JSON, in a process of limited memory, for readers that must not import torch.
"""

from __future__ import annotations

import json
import pickle
import resource
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from speculators_core.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

_OVERHEAD_BYTES = 8 << 30  # address space that Python and torch take by themselves


def load_pickled(file: Path, *, device: str = "cpu") -> dict[str, Tensor]:
    """The tensors of a state dict, memory-mapped where the file's form allows it.

    Raises `CheckpointError` where the file needs code to be run, is damaged, or holds anything
    but tensors by name.
    """
    import torch

    try:
        loaded = torch.load(
            file, weights_only=True, map_location=device, mmap=zipfile.is_zipfile(file)
        )
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            "the file is not plain tensors: reading it would run code that it carries, "
            "so it was not read",
            where=str(file),
            hint="ask its author for a safetensors file",
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError) as error:
        why = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise CheckpointError(
            f"{file.name} is damaged or incomplete: {why}",
            where=str(file),
            hint="copy or download it again",
        ) from error
    if not isinstance(loaded, dict) or not loaded:
        raise CheckpointError(
            f"{file.name} should hold tensors by name, found {type(loaded).__name__}",
            where=str(file),
            hint="save the model's state_dict itself",
        )
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{file.name} holds {type(value).__name__} under {name!r}, expected a tensor",
                where=str(file),
                hint="save the model's state_dict itself",
            )
    return loaded


def list_tensors(file: Path) -> list[tuple[str, str, Sequence[int]]]:
    """Name, dtype and shape of each tensor, their values left where they are."""
    tensors = load_pickled(file, device="meta")
    return [
        (name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()
    ]


def _reply(file: Path) -> dict[str, object]:
    try:
        return {"tensors": list_tensors(file)}
    except CheckpointError as error:
        return {"error": error.message, "hint": error.hint}


if __name__ == "__main__":
    path = Path(sys.argv[1])
    limit = _OVERHEAD_BYTES + 2 * path.stat().st_size
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    json.dump(_reply(path), sys.stdout)
