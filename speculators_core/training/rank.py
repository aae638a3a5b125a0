"""One of the processes that train together: `python -m speculators_core.training.rank PLACE`,
started by torchrun. PLACE holds the request, and takes the answer or an error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from speculators_core.__main__ import Events
from speculators_core.errors import SpeclabError, Stopped
from speculators_core.lifeline import die_with_parent
from speculators_core.params import TrainParams
from speculators_core.progress import Progress, Quiet
from speculators_core.training.launch import ANSWER, ERRORS, REQUEST, STOP
from speculators_core.training.train import train_here
from speculators_core.training.world import join, leave


class _Told(Events):
    """What the first process says; it hears a wish to stop from a file."""

    def __init__(self, place: Path) -> None:
        super().__init__(sys.stderr)
        self._file = place / STOP

    def stopping(self) -> bool:
        return self._file.exists()


def main(place: Path) -> int:
    """Train; 1 where it failed, which ends the others."""
    die_with_parent()
    request = json.loads((place / REQUEST).read_text())
    rank, local = os.environ["RANK"], os.environ["LOCAL_RANK"]
    try:
        answer = _trained(request, place)
    except SpeclabError as error:
        _write(place, f"{ERRORS}/{rank}", error.as_dict())
        return 1
    except Exception as error:
        traceback.print_exc()
        unexpected = SpeclabError(
            f"process {rank} failed: {type(error).__name__}: {error}",
            hint="the log says where it happened",
        )
        _write(place, f"{ERRORS}/{rank}", unexpected.as_dict())
        return 1
    if local == "0":
        _write(place, ANSWER, answer)
    leave()
    return 0


def _trained(request: dict[str, object], place: Path) -> dict[str, object]:
    params = TrainParams.model_validate(request["params"])
    output, resume = Path(str(request["output"])), request["resume"]
    world = join()
    progress: Progress = _Told(place) if world.first else Quiet()
    earlier = Path(str(resume)) if resume else None
    try:
        result = train_here(params, output, progress, earlier, world)
    except Stopped as stopped:
        return {"stopped": stopped.message}
    return result.model_dump(mode="json")


def _write(place: Path, name: str, told: object) -> None:
    partial = place / f".{os.environ['RANK']}.partial"
    partial.write_text(json.dumps(told))
    partial.rename(place / name)


if __name__ == "__main__":
    status = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a process group that a failed peer left must not be waited for
