"""Carry out a plan: every tensor of the result, streamed from the files it comes from.

Bytes are copied as bytes where the format stays, and looked at on their way. Light: no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from speculators_core.conversion.plan import Plan, TensorRow
from speculators_core.conversion.source import Source
from speculators_core.errors import CheckpointError, Stopped
from speculators_core.precision import Raw, all_finite, cast, castable
from speculators_core.progress import Progress
from speculators_core.vocabulary import check_vocab_map, d2t_of, t2d_of
from speculators_core.weights import Pending, write_weights

_MAP = ("d2t", "t2d")
_VOCABULARY = 8_000_000  # tokens; thirty times the largest of today
_MB = 1_000_000

Rows = dict[str, list[TensorRow]]


def write_tensors(
    source: Source,
    plan: Plan,
    directory: Path,
    progress: Progress,
    max_shard_size: int | None = None,
) -> None:
    """Write the weights of a plan, in shards of at most `max_shard_size` MB where one is given.

    Raises `CheckpointError` where a value can't be right, `Stopped` on request.
    """
    shapes, rows = plan.config.tensor_shapes(), _rows_by_target(plan)
    if "d2t" in shapes:
        ready = _vocabulary_map(source, rows, shapes)
    else:
        ready = {}
        _check_identity(source, plan)
    pending = [
        Pending(
            target,
            shapes[target],
            plan.config.tensor_dtype(target),
            ready.get(target) or _streamed(target, parts, source, plan),
        )
        for target, parts in rows.items()
    ]
    shard_bytes = max_shard_size * _MB if max_shard_size else None
    for done, name in enumerate(write_weights(directory, pending, shard_bytes), start=1):
        progress.update(0.5 * done / len(pending), f"wrote {name}")
        if progress.stopping():
            raise Stopped("the conversion was stopped; nothing was written")


def _rows_by_target(plan: Plan) -> Rows:
    """The rows that make each written tensor: one, or its parts in order."""
    rows: Rows = {}
    for row in plan.inspection.tensors:
        if row.how not in ("unused", "shared"):
            rows.setdefault(str(row.target), []).append(row)
    return rows


def _streamed(
    target: str, parts: Sequence[TensorRow], source: Source, plan: Plan
) -> Callable[[], Iterator[Raw]]:
    """What gives a tensor's bytes, its parts one after the other. Raises `CheckpointError` at once
    where the formats don't go together.
    """
    wanted = plan.config.tensor_dtype(target)
    names = [str(row.source) for row in parts]
    for name in names:
        _check_castable(name, source, wanted)

    def pieces() -> Iterator[Raw]:
        for name in names:
            found = source.tensors[name].dtype
            for piece in source.pieces(name):
                yield piece if found == wanted else _cast(name, piece, found, wanted)

    return pieces


def _check_castable(name: str, source: Source, wanted: str) -> None:
    info = source.tensors[name]
    if not castable(info.dtype, wanted):
        raise CheckpointError(
            f"tensor {name} is {info.dtype}, which can't become {wanted}",
            where=f"{info.file}: {name}",
            hint="quantised weights must be dequantised first",
        )


def _cast(name: str, piece: Raw, found: str, wanted: str) -> Raw:
    if not all_finite(piece, found):  # rounding could turn a NaN into a number
        raise CheckpointError(
            f"tensor {name} holds NaN or infinity as {found}",
            where=name,
            hint="the source file is damaged, or was trained to overflow",
        )
    return cast(piece, found, wanted)


def _vocabulary_map(
    source: Source, rows: Rows, shapes: dict[str, tuple[int, ...]]
) -> dict[str, Callable[[], list[Raw]]]:
    """Both sides of the map, checked; either side gives the other where that is derived."""
    where = str(source.directory)
    (draft_size,), (size,) = (shapes[name] for name in _MAP)
    held = {name: str(rows[name][0].source) for name in _MAP if rows[name][0].how == "copied"}
    if "d2t" in held:
        d2t = _small(held["d2t"], source, "int64").view(np.int64)
    if "t2d" in held:
        t2d = _small(held["t2d"], source, "bool") != 0
    if "d2t" not in held:
        d2t = d2t_of(t2d, draft_size, where=where)
    if "t2d" not in held:
        t2d = t2d_of(d2t, size, where=where)
    check_vocab_map(d2t, t2d, where=where)
    return {"d2t": lambda: [d2t.view(np.uint8)], "t2d": lambda: [t2d.view(np.uint8)]}


def _small(name: str, source: Source, wanted: str) -> Raw:
    _check_castable(name, source, wanted)
    return cast(source.values(name, _VOCABULARY), source.tensors[name].dtype, wanted)


def _check_identity(source: Source, plan: Plan) -> None:
    """A whole draft vocabulary needs no map; one that reorders it would be lost."""
    for row in plan.inspection.tensors:
        name = str(row.source)
        if row.how == "unused" and name.endswith("d2t") and source.values(name, _VOCABULARY).any():
            raise CheckpointError(
                "the draft vocabulary is the whole vocabulary, but d2t reorders it",
                where=f"{source.directory}: {row.source}",
                hint="vLLM and speculators can't express that",
            )
