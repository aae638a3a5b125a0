"""The rows of a plan: what becomes of a tensor, or the error that says why it can't be.

Light: no torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from speculators_core.conversion.header import TensorInfo
from speculators_core.conversion.plan import DraftConfig, TensorRow
from speculators_core.conversion.source import Source
from speculators_core.errors import CheckpointError
from speculators_core.precision import castable


def copied(target: str, info: TensorInfo, config: DraftConfig) -> TensorRow:
    """A source tensor that becomes `target`. Raises `CheckpointError` for another shape, or
    for a format that the result can't have.
    """
    shape, dtype = config.tensor_shapes()[target], config.tensor_dtype(target)
    if info.shape != shape:
        raise CheckpointError(
            f"tensor {info.name} has shape {list(info.shape)}, expected {list(shape)}",
            where=f"{info.file}: {info.name}",
            hint="config.json and tensors disagree: do they belong together?",
        )
    if not castable(info.dtype, dtype):
        raise CheckpointError(
            f"tensor {info.name} holds {info.dtype}, expected {dtype}",
            where=f"{info.file}: {info.name}",
            hint="a quantised draft can't be converted: use its weights before quantisation",
        )
    reason = "renamed" if info.name != target else "as it is"
    reason += f", {info.dtype} to {dtype}" if info.dtype != dtype else ""
    return TensorRow(
        source=info.name, target=target, shape=list(shape), dtype=dtype, reason=reason, how="copied"
    )


def derived(target: str, other: TensorInfo, config: DraftConfig, reason: str) -> TensorRow:
    """A tensor that is computed from `other`."""
    shape, dtype = config.tensor_shapes()[target], config.tensor_dtype(target)
    return TensorRow(
        source=other.name,
        target=target,
        shape=list(shape),
        dtype=dtype,
        reason=reason,
        how="derived",
    )


def shared(target: str, config: DraftConfig, reason: str) -> TensorRow:
    """A tensor that is not written: the verifier's own is used when the draft is loaded."""
    shape, dtype = config.tensor_shapes()[target], config.tensor_dtype(target)
    return TensorRow(
        source=None, target=target, shape=list(shape), dtype=dtype, reason=reason, how="shared"
    )


def unused(info: TensorInfo, reason: str) -> TensorRow:
    """A source tensor that is left out, and why that does no harm."""
    return TensorRow(
        source=info.name,
        target=None,
        shape=list(info.shape),
        dtype=info.dtype,
        reason=reason,
        how="unused",
    )


def missing(target: str, source: Source, what: str) -> CheckpointError:
    """The error that a tensor of the draft is not in the checkpoint."""
    return CheckpointError(
        f"tensor {target} is missing",
        where=f"{source.directory}: {target}",
        hint=f"the checkpoint is incomplete, or no {what}",
    )


def no_place(info: TensorInfo, why: str, hint: str) -> CheckpointError:
    """The error that a tensor can't be expressed in the result; leaving it out would change it."""
    return CheckpointError(
        f"tensor {info.name} {list(info.shape)} has no place in the result: {why}",
        where=f"{info.file}: {info.name}",
        hint=hint,
    )


def precision(named: Mapping[str, TensorInfo], main: str, source: Source) -> tuple[str, list[str]]:
    """The dtype of tensor `main`, which all are written in, and a warning where others differ."""
    if main not in named:
        raise missing(main, source, "draft of this layout")
    dtype = named[main].dtype
    others = sorted({info.dtype for info in named.values()} - {dtype})
    if not others:
        return dtype, []
    return dtype, [f"the file mixes precisions ({dtype}, {', '.join(others)}): written as {dtype}"]
