"""Pickled weights (`pytorch_model.bin`), read without running anything that they hold.

`load_pickled` is the only way in: torch's restricted unpickler builds tensors and plain
containers and refuses the rest. It runs in a process of its own, whose memory, time and rights are
limited (`python -m speculators_core.conversion.pickled FILE…`):

    out: a line of JSON, {"tensors": [[file, name, dtype, shape], …]} or {"error", "where", "hint"}
    in:  a line of JSON, the name of a tensor; out: its bytes, as many as dtype and shape say; …

`child.PickledWeights` is the other end. The process ends when its input does.
"""

from __future__ import annotations

import json
import math
import pickle
import resource
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from speculators_core.conversion.header import damaged
from speculators_core.errors import CheckpointError
from speculators_core.precision import SIZES
from speculators_core.untrusted import open_regular

if TYPE_CHECKING:
    from torch import Tensor

_SPARE_BYTES = 1 << 29  # what listing and copying take, twice the files apart
_CPU_SECONDS = 600
_TENSORS = 100_000
_PIECE = 1 << 20  # values


def load_pickled(file: Path) -> dict[str, Tensor]:
    """The tensors of a state dict, memory-mapped where the file's form allows it.

    Raises `CheckpointError` where the file needs code to be run, is damaged, would grow when it
    is read, or holds anything but tensors by name.
    """
    import torch

    zipped = _check_container(file)
    try:
        loaded = torch.load(file, weights_only=True, map_location="cpu", mmap=zipped)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            "the file is not plain tensors: reading it would run code that it carries, "
            "so it was not read",
            where=str(file),
            hint="ask its author for a safetensors file",
        ) from error
    except Exception as error:  # a damaged file makes torch raise whatever it stumbles over
        why = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise damaged(file, why) from error
    _check_loaded(loaded, file)
    return {name: tensor.detach() for name, tensor in loaded.items()}


def _check_container(file: Path) -> bool:
    """Whether the file is a zip archive, as torch writes since 1.6; its parts must be stored as
    they are: a compressed one can hold a thousand times the file's size.
    """
    with open_regular(file) as f:
        if f.read(4) != b"PK\x03\x04":
            return False
        f.seek(0)
        try:
            parts = zipfile.ZipFile(f).infolist()
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            raise damaged(file, str(error)) from error
        size = f.seek(0, 2)
    if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
        raise damaged(file, "its parts are compressed, which torch never does")
    names = {part.filename for part in parts}
    pickles = sum(name.endswith(".pkl") for name in names)
    if len(names) != len(parts) or pickles != 1:
        raise damaged(file, f"it holds {len(parts)} parts, {len(names)} names, {pickles} pickles")
    if sum(part.file_size for part in parts) > size:
        raise damaged(file, "its parts overlap")
    return True


def _check_loaded(loaded: Any, file: Path) -> None:
    if not isinstance(loaded, dict) or not loaded or len(loaded) > _TENSORS:
        count = f" of {len(loaded)} values" if isinstance(loaded, dict) else ""
        raise CheckpointError(
            f"{file.name} should hold tensors by name, found {type(loaded).__name__}{count}",
            where=str(file),
            hint="save the model's state_dict itself",
        )
    size = file.stat().st_size
    for name, value in loaded.items():
        found = _fault(name, value, size)
        if found:
            raise CheckpointError(
                f"{file.name} holds {found} under {str(name)[:80]!r}, expected a tensor",
                where=str(file),
                hint="save the model's state_dict itself",
            )


def _fault(name: object, value: Any, size: int) -> str | None:
    """What keeps an entry from being a plain tensor by name."""
    import torch

    if not isinstance(name, str) or not isinstance(value, torch.Tensor):
        return type(value).__name__
    if value.layout is not torch.strided or value.is_quantized or value.device.type != "cpu":
        return f"a tensor of {value.layout} on {value.device.type}"
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in SIZES:
        return f"a tensor of {dtype}"
    if math.prod(value.shape) * SIZES[dtype] > size:
        return f"a tensor of shape {list(value.shape)}, more than the file has"
    return None


def serve(files: Sequence[Path], requests: BinaryIO, answers: BinaryIO) -> None:
    """The child's side of the conversation above."""
    import torch

    tensors: dict[str, Tensor] = {}
    listed = []
    try:
        for file in files:
            for name, tensor in load_pickled(file).items():
                dtype = str(tensor.dtype).removeprefix("torch.")
                listed.append([str(file), name, dtype, list(tensor.shape)])
                tensors[name] = tensor
        reply: dict[str, Any] = {"tensors": listed}
    except CheckpointError as error:
        reply = {"error": error.message, "where": error.where, "hint": error.hint}
    answers.write(json.dumps(reply).encode() + b"\n")
    answers.flush()
    for line in requests:
        for piece in torch.split(tensors[json.loads(line)].reshape(-1), _PIECE):
            answers.write(piece.contiguous().view(torch.uint8).numpy().data)
        answers.flush()


def _limit(files: Sequence[Path]) -> None:
    """No more memory than the files explain, no new files, no endless computing."""
    size, _, _, _, _, data, _ = map(int, Path("/proc/self/statm").read_text().split())
    more = _SPARE_BYTES + 2 * sum(file.stat().st_size for file in files)
    for limit, pages in ((resource.RLIMIT_AS, size), (resource.RLIMIT_DATA, data)):
        memory = pages * resource.getpagesize() + more
        resource.setrlimit(limit, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    import torch  # noqa: F401  (before the limits: it may look for a place for temporary files)

    given = [Path(argument) for argument in sys.argv[1:]]
    _limit(given)
    serve(given, sys.stdin.buffer, sys.stdout.buffer)
