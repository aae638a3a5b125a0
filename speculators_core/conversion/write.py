"""Carry out a plan: every tensor of the result, streamed from the files it comes from.

Values are read one piece at a time and nothing in a pickle is run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from speculators_core.checkpoint import Pending, check_vocab_map, write_safetensors
from speculators_core.conversion.pickled import load_pickled
from speculators_core.conversion.plan import Plan, TensorRow
from speculators_core.conversion.source import Source
from speculators_core.errors import CheckpointError, Stopped
from speculators_core.progress import Progress

Read = Callable[[str], Tensor]


def write_tensors(source: Source, plan: Plan, file: Path, progress: Progress) -> None:
    """Write the safetensors file of a plan. Raises `CheckpointError` where a value can't be right,
    `Stopped` on request.
    """
    read = _reader(source)
    rows = {row.target: row for row in plan.inspection.tensors if row.how != "unused"}
    if plan.config.has_vocab_map:
        d2t, t2d = (_value(rows[name], read, plan) for name in ("d2t", "t2d"))
        check_vocab_map(d2t, t2d, where=str(source.directory))
    else:
        _check_identity(source, plan, read)
    pending = [
        Pending(
            name=str(row.target),
            shape=tuple(row.shape),
            dtype=getattr(torch, row.dtype),
            read=lambda row=row: _value(row, read, plan),  # type: ignore[misc]
        )
        for row in rows.values()
        if row.how != "shared"
    ]
    for done, name in enumerate(write_safetensors(file, pending), start=1):
        progress.update(0.5 * done / len(pending), f"wrote {name}")
        if progress.stopping():
            raise Stopped("the conversion was stopped; nothing was written")


def _reader(source: Source) -> Read:
    """Tensors by source name; mapped from the file, so that reading one costs no copy."""
    if source.pickled:
        loaded: dict[str, Tensor] = {}
        for file in source.files:
            loaded |= load_pickled(file)
        return loaded.__getitem__
    handles: dict[Path, Any] = {file: safe_open(file, framework="pt") for file in source.files}

    def read(name: str) -> Tensor:
        tensor: Tensor = handles[source.tensors[name].file].get_tensor(name)
        return tensor

    return read


def _value(row: TensorRow, read: Read, plan: Plan) -> Tensor:
    """The tensor of one row; of the vocabulary map, either side gives the other."""
    value = read(str(row.source))
    if row.how == "derived" and row.target == "t2d":
        ids = torch.arange(len(value)) + value.long()
        if bool((ids < 0).any()) or bool((ids >= plan.config.vocab_size).any()):
            raise CheckpointError(
                f"d2t points outside the verifier's vocabulary of {plan.config.vocab_size}",
                where="d2t",
                hint="d2t holds offsets (verifier id = i + d2t[i]); these may be absolute ids",
            )
        kept = torch.zeros(plan.config.vocab_size, dtype=torch.bool)
        kept[ids] = True
        return kept
    if row.how == "derived":
        ids = value.nonzero().flatten()
        if len(ids) != plan.config.draft_vocab_size:
            raise CheckpointError(
                f"t2d keeps {len(ids)} tokens, lm_head has {plan.config.draft_vocab_size} rows",
                where="t2d",
                hint="the map belongs to another draft",
            )
        return ids - torch.arange(len(ids))
    return value.to(getattr(torch, row.dtype)) if row.target in ("d2t", "t2d") else value


def _check_identity(source: Source, plan: Plan, read: Read) -> None:
    """A whole draft vocabulary needs no map; one that reorders it would be lost."""
    for row in plan.inspection.tensors:
        if row.how == "unused" and str(row.source).endswith("d2t") and read(str(row.source)).any():
            raise CheckpointError(
                "the draft vocabulary is the whole vocabulary, but d2t reorders it",
                where=f"{source.directory}: {row.source}",
                hint="vLLM and speculators can't express that",
            )
