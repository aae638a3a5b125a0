"""The registered speculators: directories in speculators format, to evaluate and serve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import select

from app.services.names import place_for
from app.services.views import SpeculatorView
from app.store.engine import reading, writing
from app.store.models import Speculator
from speculators_core.config import Eagle3Config
from speculators_core.errors import NotFound


def list_speculators(*, deployable_only: bool = False) -> list[SpeculatorView]:
    """Newest first."""
    query = select(Speculator).order_by(Speculator.created_at.desc())
    with reading() as session:
        rows = session.scalars(query.where(Speculator.deployable) if deployable_only else query)
        return [SpeculatorView.model_validate(row) for row in rows]


def get(name: str) -> SpeculatorView:
    """By name or id. Raises `NotFound`."""
    with reading() as session:
        wanted = (Speculator.name == name) | (Speculator.id == name)
        row = session.scalar(select(Speculator).where(wanted).limit(1))
    if row is None:
        raise NotFound(
            f"there is no speculator {name!r}", hint="train or convert one, see the Models page"
        )
    return SpeculatorView.model_validate(row)


def register(
    path: str | Path,
    name: str,
    *,
    verifier: str | None = None,
    deployable: bool = True,
    doubts: Sequence[Any] = (),
    run_id: str | None = None,
) -> SpeculatorView:
    """Read DIR/config.json and keep its facts; a name that is taken gets a number.

    `verifier`: the lab's name or path of it (default: what the config says). Raises
    `CheckpointError` where the directory is not in speculators format.
    """
    directory = Path(path).resolve()
    config = Eagle3Config.load(directory)
    values = {
        "verifier": verifier or config.speculators_config.verifier.name_or_path,
        "algorithm": config.speculators_config.algorithm,
        "draft_vocab_size": config.draft_vocab_size,
        "speculative_tokens": config.speculative_tokens,
        "deployable": deployable,
        "doubts": list(doubts),
        "run_id": run_id,
    }
    with writing() as session:
        free, row = place_for(session, Speculator, name, str(directory))
        row = row or Speculator(name=free, path=str(directory))
        for field, value in values.items():
            setattr(row, field, value)
        session.add(row)
        session.flush()
        return SpeculatorView.model_validate(row)
