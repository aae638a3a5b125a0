"""An MTP head back into its verifier, as vLLM serves it: with `mtp.*` among the verifier's weights.

Only the files that hold the head are written anew, tensor by tensor; the other weights are
hard-linked where the disk allows it, so that stitching a head into a model of hundreds of
gigabytes writes the one or two that change. Light: no torch.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from speculators_core.config import read_json
from speculators_core.conversion import rows
from speculators_core.conversion.header import TensorInfo
from speculators_core.conversion.mtp import MTP, experts_of, native_name
from speculators_core.conversion.pairing import check_sizes
from speculators_core.conversion.source import Source, open_source
from speculators_core.errors import CheckpointError, Conflict, PairingError, Stopped
from speculators_core.models.mtp_config import SHARED, MTPConfig
from speculators_core.models.verifier_config import read_verifier
from speculators_core.output import complete_or_absent
from speculators_core.params import StitchParams
from speculators_core.precision import SIZES
from speculators_core.progress import Progress, Quiet
from speculators_core.weights import INDEX, Pending, write_safetensors


class StitchResult(BaseModel):
    """What `speclab stitch-mtp --json` prints. `rewritten` are the weight files that changed,
    `kept` those that are the verifier's own.
    """

    model_config = ConfigDict(frozen=True)

    output: str
    replaced: int
    rewritten: list[str]
    kept: list[str]


def stitch_mtp(
    params: StitchParams, output: str | Path, progress: Progress | None = None
) -> StitchResult:
    """Write the verifier with the head of a speculators-format MTP checkpoint to `output`, which
    must not exist yet.

    Raises `CheckpointError` where the head is not whole, `PairingError` where it is another
    verifier's, `Conflict` where `output` exists or lies in the verifier, `Stopped` on request;
    nothing is left behind then.
    """
    output, progress = Path(output), progress or Quiet()
    if output.resolve().is_relative_to(Path(params.verifier).resolve()):
        raise Conflict(
            "the output lies in the verifier's directory, which is copied with all that it holds",
            where=str(output),
            hint="choose a place outside of it",
        )
    with complete_or_absent(output) as directory:
        head, verifier = open_source(params.speculator), open_source(params.verifier)
        if verifier.pickled:
            raise CheckpointError(
                "the verifier's weights are pickled, which vLLM's MTP heads are not loaded from",
                where=str(verifier.directory),
                hint="save the verifier as safetensors first",
            )
        new = _native(head, verifier)
        changed = sorted({verifier.tensors[name].file for name in new.tensors})
        _write(changed, new, verifier, directory, progress)
        kept = _keep(verifier, set(changed), directory)
        _write_index(new, verifier, directory)
    progress.update(1.0, "stitched")
    return StitchResult(
        output=str(output),
        replaced=len(new.tensors),
        rewritten=[file.name for file in changed],
        kept=kept,
    )


def _native(head: Source, verifier: Source) -> Source:
    """The head's tensors by the names, and in the pieces, that the verifier has them."""
    config = _config_of(head)
    facts = read_verifier(verifier.directory)
    layers = config.transformer_layer_config.num_hidden_layers
    check_sizes(config.vocab_size, config.verifier_hidden_size, layers, facts)
    named: dict[str, TensorInfo] = {}
    for target in sorted(config.tensor_shapes().keys() - SHARED):
        if target not in head.tensors:
            raise rows.missing(target, head, "MTP head in speculators format")
        info = head.tensors[target]
        rows.copied(target, info, config)
        named |= _as_kept(target, info, verifier)
    _check_whole(named, verifier)
    return replace(head, tensors=named)


def _config_of(head: Source) -> MTPConfig:
    kind = head.config.get("speculators_model_type")
    where = str(head.directory / "config.json")
    if kind != "mtp" or head.pickled:
        raise CheckpointError(
            f"expected an MTP head in speculators format, found type {kind!r}",
            where=where,
            hint="take it out of its verifier first: speclab convert VERIFIER --verifier VERIFIER",
        )
    return MTPConfig.parse(head.config, where=where)


def _as_kept(target: str, info: TensorInfo, verifier: Source) -> dict[str, TensorInfo]:
    """One tensor of the head under its native name, or its experts one by one where the verifier
    keeps them so.
    """
    name, parts = native_name(target), experts_of(target)
    if name in verifier.tensors or parts is None:
        return {name: replace(info, name=name)}
    experts, height, width = info.shape
    shape = (height // len(parts), width)
    size = math.prod(shape) * SIZES[info.dtype]
    assert info.start is not None  # a safetensors file
    found = {}
    for expert in range(experts):
        for at, part in enumerate(parts):
            own = native_name(target, expert=expert, part=part)
            start = info.start + (expert * len(parts) + at) * size
            found[own] = TensorInfo(own, info.dtype, shape, info.file, start)
    return found


def _check_whole(named: dict[str, TensorInfo], verifier: Source) -> None:
    """Every tensor of the head has its place in the verifier, and takes all that is there."""
    theirs = {name for name in verifier.tensors if name.startswith(MTP)}
    for name in sorted(named.keys() ^ theirs):
        side = "the head" if name in theirs else "the verifier"
        raise PairingError(
            f"tensor {name} is not in {side}: it was not taken out of this verifier",
            where=f"{verifier.directory}: {name}",
            hint="choose the verifier that the head was taken from",
        )
    for name, info in named.items():
        shape = verifier.tensors[name].shape
        if info.shape != shape:
            raise PairingError(
                f"tensor {name} has shape {list(info.shape)}, the verifier's {list(shape)}",
                where=f"{info.file}: {name}",
                hint="choose the verifier that the head was taken from",
            )


def _write(
    files: list[Path], new: Source, verifier: Source, directory: Path, progress: Progress
) -> None:
    """The files that hold the head, with its new tensors in place of the old ones."""
    of_file = {f: [i for i in verifier.tensors.values() if i.file == f] for f in files}
    total, done = sum(map(len, of_file.values())), 0
    for file, infos in of_file.items():
        pending = [_pending(info.name, new, verifier) for info in infos]
        for name in write_safetensors(directory / file.name, pending):
            done += 1
            progress.update(0.95 * done / total, f"wrote {name}")
            if progress.stopping():
                raise Stopped("the stitching was stopped; nothing was written")


def _pending(name: str, new: Source, verifier: Source) -> Pending:
    source = new if name in new.tensors else verifier
    info = source.tensors[name]
    return Pending(name, info.shape, info.dtype, partial(source.pieces, name))


def _keep(verifier: Source, changed: set[Path], directory: Path) -> list[str]:
    """Everything else of the verifier's directory: weights linked or copied, the rest copied."""
    weights = set(verifier.files)
    for entry in sorted(verifier.directory.iterdir()):
        place = directory / entry.name
        if entry in changed or entry.name == INDEX or entry.name.startswith("."):
            continue
        if entry.is_dir():
            shutil.copytree(entry, place)
        elif entry in weights:
            _link_or_copy(entry.resolve(), place)
        elif entry.is_file():  # a socket or FIFO is no part of a model
            shutil.copyfile(entry, place)
    return sorted(file.name for file in weights - changed)


def _link_or_copy(file: Path, place: Path) -> None:
    try:
        os.link(file, place)
    except OSError:  # another disk, or a file system without links
        shutil.copyfile(file, place)


def _write_index(new: Source, verifier: Source, directory: Path) -> None:
    """The verifier's index, whose total changes where the head has another precision."""
    if not (verifier.directory / INDEX).exists():
        return
    index = read_json(verifier.directory / INDEX)
    infos = {**verifier.tensors, **new.tensors}
    total = sum(info.nbytes for info in infos.values())
    index["metadata"] = {**(index.get("metadata") or {}), "total_size": total}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
