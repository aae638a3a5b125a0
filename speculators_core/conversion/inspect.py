"""What is this checkpoint, what would each tensor become, and what is doubtful. Light: no torch.

Adding a layout is adding a module with a `plan.Layout` and naming it in `LAYOUTS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speculators_core.conversion.angelslim import AngelSlim
from speculators_core.conversion.dflash import DFlash
from speculators_core.conversion.eagle import Eagle
from speculators_core.conversion.model_optimizer import ModelOptimizer
from speculators_core.conversion.mtp import MTPHead
from speculators_core.conversion.native import Native
from speculators_core.conversion.native_dflash import NativeDFlash
from speculators_core.conversion.native_mtp import NativeMTP
from speculators_core.conversion.options import refuse_ignored
from speculators_core.conversion.plan import Inspection, Layout, Plan
from speculators_core.conversion.research import Research
from speculators_core.conversion.rounding import in_precision
from speculators_core.conversion.source import Source, open_source
from speculators_core.conversion.specforge import SpecForge
from speculators_core.errors import CheckpointError
from speculators_core.hub.headers import looking_at, small_files
from speculators_core.models.verifier_config import VerifierFacts, read_verifier
from speculators_core.params import ConvertParams, parse_model
from speculators_core.untrusted import check_links, is_here

_UNREAD = "safetensors files come first, and it may hold other weights"

LAYOUTS: tuple[Layout, ...] = (
    Native(),
    NativeDFlash(),
    NativeMTP(),
    DFlash(),
    MTPHead(),
    ModelOptimizer(),
    AngelSlim(),
    SpecForge(),
    Research(),
    Eagle(),
)


def inspect(
    checkpoint: str | Path,
    verifier: str | Path | None = None,
    *,
    roots: Sequence[Path] | None = None,
    settled: Mapping[str, Any] | None = None,
) -> Inspection:
    """Look at a checkpoint without torch: a directory, or a hub id, of which only configuration
    and headers are fetched.

    With its verifier the plan is complete: without, what only the verifier can tell is open.
    `settled` are further fields of `ConvertParams`, as a person has chosen them.
    Raises `CheckpointError` for what is no draft, `PairingError` for one of another
    verifier.
    """
    named = {"checkpoint": str(checkpoint), "verifier": str(verifier or "unknown")}
    params = parse_model(ConvertParams, {**(settled or {}), **named}, "parameters of convert")
    facts = None
    if verifier is not None:
        place = small_files(str(verifier))
        if roots is not None:
            check_links(place, roots)
        facts = read_verifier(place)
    with looking_at(checkpoint) as directory:
        source = open_source(directory, roots if is_here(checkpoint) else None)
        return plan_of(source, facts, params)[1].inspection


def plan_of(
    source: Source, verifier: VerifierFacts | None, params: ConvertParams
) -> tuple[Layout, Plan]:
    """The layout of a checkpoint and what it becomes, in the precision that is asked for. Raises
    as `plan.Layout`, and `InputError` for an option that such a draft would ignore.
    """
    layout = recognise(source)
    plan = layout.plan(source, verifier, params)
    refuse_ignored(params, plan.config.algorithm)
    if source.unread:
        plan = plan.warned(f"{source.unread} lies there, too, and was not read: {_UNREAD}")
    return layout, in_precision(plan, params)


def recognise(source: Source) -> Layout:
    """The layout that the content shows, or a `CheckpointError` that says what was found."""
    for layout in LAYOUTS:
        if layout.recognises(source):
            return layout
    raise CheckpointError(
        f"not a draft that can be read: {describe(source)}",
        where=str(source.directory),
        hint=f"layouts that can be read: {', '.join(layout.name for layout in LAYOUTS)}",
    )


def describe(source: Source) -> str:
    """What an unknown checkpoint looks like, in words."""
    names, config = source.tensors, source.config
    layers = {name.split("layers.")[1].split(".")[0] for name in names if "layers." in name}
    if kind := config.get("speculators_model_type"):
        return f"a speculators checkpoint of type {kind!r}; eagle3, dflash and mtp are written anew"
    if any(name.startswith("medusa") for name in names):
        return "Medusa heads"
    if not any(name.endswith("fc.weight") for name in names):
        whose = ", ".join(config.get("architectures") or ()) or "an unnamed model"
        return (
            f"no fc.weight and no d2t found, but {len(layers)} layers of {whose}: a whole language "
            "model? "
            "(are speculator and verifier swapped?)"
        )
    return (
        "fc.weight is there, but neither a hidden_norm in the first layer (EAGLE-3) nor a width of "
        f"twice its rows (EAGLE-1): {len(names)} tensors, {len(layers)} layers"
    )
