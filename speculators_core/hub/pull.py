"""Bring a repository of the hub here, and say what it holds. Light: no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from speculators_core.config import Eagle3Config
from speculators_core.conversion.inspect import inspect
from speculators_core.conversion.plan import Doubt
from speculators_core.errors import CheckpointError
from speculators_core.hub.download import fetch, listing
from speculators_core.hub.reference import parse_hub_id
from speculators_core.models.draft_config import read_draft_config
from speculators_core.models.hub import checkpoint_files
from speculators_core.models.verifier_config import read_verifier
from speculators_core.params import PullParams
from speculators_core.progress import Progress

What = Literal["speculator", "verifier", "checkpoint"]


class PullResult(BaseModel):
    """What `speclab pull --json` prints. `revision` is the commit, whatever was asked for; `what`
    is `checkpoint` for a draft in a layout that has to be converted; `size` in bytes. `doubts` of
    a speculator are those that its conversion would ask about.
    """

    model_config = ConfigDict(frozen=True)

    output: str
    repository: str
    revision: str
    size: int
    what: What
    doubts: list[Doubt] = []


def pull(params: PullParams, progress: Progress | None = None) -> PullResult:
    """Download weights, configuration, tokenizer and card into the hub's cache; never code.

    Weights are safetensors; pickles only where there are none. Raises as `download.fetch`.
    """
    wanted = parse_hub_id(params.repository, params.revision)
    found = listing(wanted)
    got = fetch(found.hub_id, checkpoint_files(found), progress)
    what = _what(got.directory)
    return PullResult(
        output=str(got.directory),
        repository=got.hub_id.repository,
        revision=str(got.hub_id.revision),
        size=got.size,
        what=what,
        doubts=_doubts(got.directory) if what == "speculator" else [],
    )


def _doubts(directory: Path) -> list[Doubt]:
    """An EAGLE-3 draft may leave open which states it was trained on."""
    eagle3 = isinstance(read_draft_config(directory), Eagle3Config)
    return [d for d in inspect(directory).doubts if d.chosen is None] if eagle3 else []


def _what(directory: Path) -> What:
    readers: dict[What, object] = {"speculator": read_draft_config, "verifier": read_verifier}
    for what, reader in readers.items():
        try:
            reader(directory)  # type: ignore[operator]
        except CheckpointError:
            continue
        return what
    return "checkpoint"
