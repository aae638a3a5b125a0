"""A registered speculator elsewhere: the commands that serve it, and what an export would lose."""

from __future__ import annotations

from pathlib import Path

from app.services import references, speculators
from speculators_core import launch
from speculators_core.conversion.export import losses_in
from speculators_core.conversion.losses import Loss
from speculators_core.launch import Commands
from speculators_core.params import ExportParams, LaunchParams


def commands(params: LaunchParams) -> Commands:
    """For a speculator by its registered name; never for any other directory.

    Raises `NotFound`, `CheckpointError` where its files are gone, `InputError` where nothing names
    its verifier.
    """
    place = speculators.get(params.speculator).path
    return launch.commands(params.model_copy(update={"speculator": place}))


def losses(params: ExportParams) -> list[Loss]:
    """What the layout would not hold of a registered speculator. A verifier of the hub is not
    fetched for it.

    Raises `NotFound`, `CheckpointError`, and `InputError` where the layout can't hold it at all.
    """
    place = speculators.get(params.speculator).path
    verifier = references.resolve(params.verifier, "verifier") if params.verifier else None
    known = verifier if verifier and Path(verifier).is_absolute() else None
    return losses_in(params.model_copy(update={"speculator": place, "verifier": known}))
