"""The registered speculators: directories in speculators format, to evaluate and serve."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, or_, select

from app.services.names import place_for
from app.services.verdict import verdict_of
from app.services.views import SpeculatorView, Verdict
from app.settings import settings
from app.store.engine import reading, writing
from app.store.models import Speculator, now
from speculators_core.errors import Conflict, NotFound
from speculators_core.models.draft_config import read_draft_config, verifier_of

logger = logging.getLogger(__name__)


def list_speculators(*, deployable_only: bool = False) -> list[SpeculatorView]:
    """Newest first. `deployable_only`: also those that a person allowed."""
    query = select(Speculator).order_by(Speculator.created_at.desc())
    if deployable_only:
        query = query.where(or_(Speculator.deployable, Speculator.allowed_by.is_not(None)))
    with reading() as session:
        rows = session.scalars(query)
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
    failed: Sequence[str] = (),
    run_id: str | None = None,
) -> SpeculatorView:
    """Read DIR/config.json and keep its facts; a name that is taken gets a number.

    `verifier`: the lab's name or path of it (default: what the config says). `failed`: checks that
    failed, in words. A decision to allow what was there before is forgotten. Raises
    `CheckpointError` where the directory is neither in speculators format nor an EAGLE head.
    """
    directory = Path(path).resolve()
    config = read_draft_config(directory)
    values = {
        "verifier": verifier or verifier_of(config),
        "algorithm": config.algorithm,
        "draft_vocab_size": config.draft_vocab_size,
        "speculative_tokens": config.speculative_tokens,
        "deployable": deployable and config.algorithm != "mtp",  # served inside its verifier
        "doubts": list(doubts),
        "failed": list(failed),
        "allowed_by": None,
        "allowed_at": None,
        "allowed_despite": None,
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


def allow(name: str, by: str) -> SpeculatorView:
    """Record that a person deploys it in spite of what its conversion left open or saw fail.

    Allowing twice changes nothing: the first decision stays. Raises `NotFound`, or `Conflict`
    where no decision can help (`SpeculatorView.needed`).
    """
    seen = get(name)
    if seen.servable:
        return seen
    if seen.needed:
        raise Conflict(f"{seen.name} can't be served by anything as it is", hint=seen.needed)
    with writing() as session:
        row = session.get_one(Speculator, seen.id, with_for_update=True)
        if row.allowed_by is None:
            row.allowed_by, row.allowed_at = by, now()
            row.allowed_despite = seen.obstacles
            logger.info("%s allowed %s in spite of: %s", by, seen.name, "; ".join(seen.obstacles))
        session.flush()
        return SpeculatorView.model_validate(row)


def adopt(path: str | Path) -> SpeculatorView:
    """The row of a converted directory, registered under the directory's name and with the
    verdict of its own report where it has none yet. Raises as `register`.
    """
    directory = Path(path).expanduser().resolve()
    if known := _registered(Speculator.path == str(directory)):
        return known[0]
    found = verdict_of(directory)
    given = {} if found is None else found.model_dump(exclude={"algorithm"})
    return register(directory, directory.name, **given)


def require_servable(reference: str) -> None:
    """Raise `Conflict` if this names (by name, directory or run) a speculator that its conversion
    found not fit to be served and that nobody has allowed; of a directory that is not registered,
    or where there is no lab, its own report tells.
    """
    if not settings().has_store:
        _require_fit(verdict_of(Path(reference).expanduser()), reference)
        return
    if reference.startswith("run:"):
        run_id = reference.removeprefix("run:").partition("/")[0]
        found = _registered(Speculator.run_id == run_id)
    else:
        place = Path(os.path.realpath(Path(reference).expanduser()))
        found = _registered(Speculator.name == reference) or _registered(
            Speculator.path == str(place)
        )
        if not found:
            _require_fit(verdict_of(place), reference)
    for one in found:
        if not one.servable:
            _require_fit(one, one.name)


def _registered(condition: ColumnElement[bool]) -> list[SpeculatorView]:
    with reading() as session:
        rows = session.scalars(select(Speculator).where(condition))
        return [SpeculatorView.model_validate(row) for row in rows]


def _require_fit(verdict: Verdict | None, name: str) -> None:
    if verdict is not None and verdict.obstacles:
        raise Conflict(
            f"{name} is not ready to be deployed: {'; '.join(verdict.obstacles)}",
            hint=verdict.needed
            or "convert it again with a choice that settles this, or decide to deploy it all "
            f"the same: speclab allow {name}",
        )
