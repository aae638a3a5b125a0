"""One of the processes that train together: `python -m speculators_core.training.rank PLACE`,
started by torchrun. PLACE holds the request, and takes the answer or an error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from speculators_core.__main__ import Events
from speculators_core.errors import SpeclabError, Stopped
from speculators_core.lifeline import die_with_parent
from speculators_core.params import TrainParams
from speculators_core.progress import Progress, Quiet
from speculators_core.training.launch import AGENT, ANSWER, ERRORS, REQUEST, STOP

if TYPE_CHECKING:
    from speculators_core.training.world import World


class _Voice(Events):
    """What the first process says; it hears a wish to stop from a file."""

    def __init__(self, place: Path) -> None:
        super().__init__(sys.stderr)
        self._file = place / STOP

    def stopping(self) -> bool:
        return self._file.exists()


def main(place: Path) -> int:
    """Train; 1 where it failed, which ends the others."""
    die_with_parent(int(os.environ[AGENT]))  # before torch is imported, which takes seconds
    from speculators_core.training.world import join, leave

    world = join()
    try:
        answer = _trained(place, world)
    except Exception as error:
        _write(place, f"{ERRORS}/{world.rank}", _told(error, world.rank))
        world.fail()
        return 1
    if world.local_rank == 0:
        _write(place, ANSWER, answer)
    leave()
    return 0


def _trained(place: Path, world: World) -> dict[str, object]:
    from speculators_core.training.train import train_here

    request = json.loads((place / REQUEST).read_text())
    params = TrainParams.model_validate(request["params"])
    progress: Progress = _Voice(place) if world.first else Quiet()
    resume = Path(request["resume"]) if request["resume"] else None
    try:
        result = train_here(params, Path(request["output"]), progress, resume, world)
    except Stopped as stopped:
        return {"stopped": stopped.message}
    return result.model_dump(mode="json")


def _told(error: Exception, rank: int) -> dict[str, str | None]:
    if isinstance(error, SpeclabError):
        return error.as_dict()
    traceback.print_exception(error)
    return SpeclabError(
        f"process {rank} failed: {type(error).__name__}: {error}",
        hint="the log says where it happened",
    ).as_dict()


def _write(place: Path, name: str, told: object) -> None:
    partial = place / f".{os.environ['RANK']}.partial"
    partial.write_text(json.dumps(told))
    partial.rename(place / name)


if __name__ == "__main__":
    status = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a process group that a failed peer left must not be waited for
