"""Going on with a run that ended early, from what it left: the same run, another attempt."""

from __future__ import annotations

from app.services import runs
from app.services.views import RunView
from app.services.waking import wake
from app.store.engine import writing
from app.store.models import RunState
from app.store.transitions import move
from speculators_core.errors import Conflict
from speculators_core.params import JobKind

KINDS = frozenset({JobKind.TRAIN, JobKind.REGENERATE})
"""Kinds whose job goes on from files of its own run."""
_EARLY = (RunState.FAILED, RunState.CANCELLED, RunState.LOST)


def can_resume(run: RunView) -> bool:
    """Whether it ended early and had begun."""
    return run.kind in KINDS and run.state in _EARLY and run.started_at is not None


def resume(run_id: str, who: str) -> RunView:
    """Queue it again with its own parameters, files, metrics and log.

    Runs that needed it have failed meanwhile, and stay so. Raises `NotFound`, and `Conflict` where
    there is nothing to go on with.
    """
    run = runs.get(run_id)
    if not can_resume(run):
        raise Conflict(
            f"run {run_id} can't be resumed: a {run.kind.value} run that is {run.state.value}",
            hint="a training or a regeneration can that ended early after it had begun",
        )
    with writing() as session:
        moved = move(
            session,
            run_id,
            _EARLY,
            RunState.QUEUED,
            error=None,
            finished_at=None,
            woken_at=None,
            heartbeat_at=None,
            progress_text=f"{who} resumed it",
        )
    if moved:
        wake([run_id])
    return runs.get(run_id)
