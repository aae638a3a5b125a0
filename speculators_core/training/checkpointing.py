"""Training checkpoints: complete or absent, and never none.

    DIR/step-0000100/weights.safetensors   the trainable tensors
    DIR/step-0000100/state.pt              optimizer, random state (torch, weights only)
    DIR/step-0000100/position.json         `Position`: where the run is
    DIR/best-0000100/…                     weights and position of the best validation so far

A checkpoint is written under a hidden name and renamed; older ones go only after that.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculators_core.errors import CheckpointError
from speculators_core.output import complete_or_absent

_STEP = "step-"
_BEST = "best-"


class Position(BaseModel):
    """Where a training run is: enough to continue in exactly the same way."""

    model_config = ConfigDict(extra="forbid")

    step: int = 0  # optimiser steps taken
    epoch: int = 0
    batch: int = 0  # optimiser steps of this epoch that are done
    seconds: float = 0.0  # of training, earlier attempts included
    tokens: int = 0
    skipped: int = 0  # steps without a trained token
    quarantined: list[int] = []  # documents that are not used
    schedule: dict[str, Any] = {}
    best: dict[str, float] = {}  # validation numbers of the best weights
    stale: int = 0  # judgements since those
    fingerprint: str = ""  # of parameters and data: another run's checkpoint is refused

    @property
    def told(self) -> str:
        return f"step {self.step}, epoch {self.epoch}"

    def advance(self, steps: int) -> None:
        """Move behind a step's rows, of the `steps` of this epoch."""
        self.batch += 1
        if self.batch == steps:
            self.epoch, self.batch = self.epoch + 1, 0


@dataclass(frozen=True)
class Checkpoint:
    position: Position
    weights: dict[str, Tensor]
    state: dict[str, Any]


def save(
    directory: Path, position: Position, weights: Mapping[str, Tensor], state: dict[str, Any]
) -> Path:
    """Write the checkpoint of this step unless it is there, then remove the steps before it."""
    place = directory / f"{_STEP}{position.step:07d}"
    if place.exists():  # the same, and replacing it would leave a moment without any
        return place
    with complete_or_absent(place) as partial:
        _write(partial, position, weights)
        torch.save(state, partial / "state.pt")
    _remove_before(place, _STEP)
    return place


def save_best(directory: Path, position: Position, weights: Mapping[str, Tensor]) -> None:
    """Keep these weights as the best so far."""
    place = directory / f"{_BEST}{position.step:07d}"
    with complete_or_absent(place, overwrite=True) as partial:
        _write(partial, position, weights)
    _remove_before(place, _BEST)


def adopt_best(earlier: Path, directory: Path) -> None:
    """Bring the best weights of an earlier attempt elsewhere into this one's directory."""
    if earlier.resolve() == directory.resolve():
        return
    for place in _places(earlier, _BEST)[-1:]:
        with complete_or_absent(directory / place.name, overwrite=True) as partial:
            shutil.copytree(place, partial, dirs_exist_ok=True)


def load_last(directory: Path, fingerprint: str) -> Checkpoint | None:
    """The newest checkpoint, or None where there is none yet.

    Raises `CheckpointError` where it is damaged, or belongs to a run with other parameters.
    """
    places = _places(directory, _STEP)
    if not places:
        return None
    place = places[-1]
    position, weights = _read(place)
    if position.fingerprint != fingerprint:
        raise CheckpointError(
            "this checkpoint is of a run with other parameters or data",
            where=str(place),
            hint="resume with the parameters that it was started with, or start anew",
        )
    try:
        state = torch.load(place / "state.pt", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise _damaged(place, error) from error
    return Checkpoint(position, weights, state)


def load_best(directory: Path) -> tuple[Position, dict[str, Tensor]] | None:
    """The best weights so far, or None."""
    places = _places(directory, _BEST)
    return _read(places[-1]) if places else None


def _places(directory: Path, kind: str) -> list[Path]:
    """Checkpoints of a kind, oldest first."""
    return sorted(directory.glob(f"{kind}*"))


def _remove_before(place: Path, kind: str) -> None:
    for older in _places(place.parent, kind):
        if older != place:
            shutil.rmtree(older, ignore_errors=True)


def _write(place: Path, position: Position, weights: Mapping[str, Tensor]) -> None:
    tensors = {name: t.detach().cpu().contiguous() for name, t in weights.items()}
    save_file(tensors, place / "weights.safetensors")
    (place / "position.json").write_text(position.model_dump_json(indent=2) + "\n")


def _read(place: Path) -> tuple[Position, dict[str, Tensor]]:
    try:
        text = (place / "position.json").read_text(encoding="utf-8")
        return Position.model_validate_json(text), load_file(place / "weights.safetensors")
    except (OSError, ValidationError, SafetensorError) as error:
        raise _damaged(place, error) from error


def _damaged(place: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"the training checkpoint can't be read: {str(error).splitlines()[0]}",
        where=str(place),
        hint="remove this directory to start from the one before, or from the beginning",
    )
