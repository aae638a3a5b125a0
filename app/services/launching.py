"""The commands that serve a registered speculator elsewhere."""

from __future__ import annotations

from app.services import speculators
from speculators_core import launch
from speculators_core.launch import Commands
from speculators_core.params import LaunchParams


def commands(params: LaunchParams) -> Commands:
    """For a speculator by its registered name; never for any other directory.

    Raises `NotFound`, `CheckpointError` where its files are gone, `InputError` where nothing names
    its verifier.
    """
    place = speculators.get(params.speculator).path
    return launch.commands(params.model_copy(update={"speculator": place}))
