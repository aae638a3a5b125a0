"""Where a run keeps its checkpoints, where it finds an earlier attempt's, and that all processes
look at the same disk.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from speculators_core.errors import CheckpointError, Conflict, InputError
from speculators_core.training.checkpointing import Checkpoint
from speculators_core.training.world import World

_SHARED = "machines that train together need this directory on one shared disk"


def checkpoints_of(output: Path) -> Path:
    return output.parent / f"{output.name}.checkpoints"


def earlier_attempt(output: Path, resume: Path | None) -> Path | None:
    """Where to look for a checkpoint; None to start from the beginning. Raises `Conflict` where
    the output is there, or checkpoints that nobody asked to go on from.
    """
    checkpoints = checkpoints_of(output)
    if output.exists():
        raise Conflict("the output exists already", where=str(output), hint="choose another output")
    if resume is None:
        if checkpoints.exists():
            raise Conflict(
                "checkpoints of an earlier attempt are there",
                where=str(checkpoints),
                hint=f"continue with --resume {checkpoints}, or remove them",
            )
        return None
    if any(resume.glob("step-*")):
        return resume
    inside = sorted(p for p in resume.glob("*.checkpoints") if any(p.glob("step-*")))
    return inside[0] if inside else None


def check_shared(world: World, directory: Path) -> None:
    """Raise `InputError` in every process unless all of them see what the first one writes there:
    the best weights are read back by all.
    """
    if world.size == 1:
        return
    mark = directory / f".shared-{world.heard(secrets.randbelow(1 << 31))}"
    if world.first:
        directory.mkdir(parents=True, exist_ok=True)
        mark.touch()
    world.meet()
    seen = world.values(int(mark.exists()))
    if world.first:
        mark.unlink(missing_ok=True)
    if not all(seen):
        raise InputError(
            f"process {seen.index(0)} does not see what process 0 writes",
            where=str(directory),
            hint=_SHARED,
        )


def check_same_step(world: World, checkpoint: Checkpoint | None, where: str) -> None:
    """Raise `CheckpointError` in every process unless all have found the same checkpoint."""
    steps = world.values(checkpoint.position.step if checkpoint else 0)
    for rank, step in enumerate(steps):
        if step != steps[0]:
            found = [f"that of step {s}" if s else "none" for s in (steps[0], step)]
            raise CheckpointError(
                f"the processes found different checkpoints: process 0 {found[0]}, "
                f"process {rank} {found[1]}",
                where=where,
                hint=_SHARED,
            )
