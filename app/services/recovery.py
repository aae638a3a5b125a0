"""What becomes of runs whose worker or job process died. The reaper calls these."""

from __future__ import annotations

import logging
from datetime import timedelta

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.services.views import RunView
from app.services.waking import wake, wake_ready
from app.store.engine import reading, writing
from app.store.models import Run, RunState, now
from app.store.transitions import ACTIVE, can_requeue, end, move
from speculators_core.errors import Unavailable

logger = logging.getLogger(__name__)


def lost_runs(host: str | None, older_than: float) -> list[RunView]:
    """Running runs of a host (None: of any) that have been silent for `older_than` seconds."""
    limit = now() - timedelta(seconds=older_than)
    heard = func.coalesce(Run.heartbeat_at, Run.started_at, Run.created_at)
    with reading() as session:
        query = select(Run).where(Run.state.in_(ACTIVE), heard <= limit).order_by(Run.created_at)
        rows = session.scalars(query.where(Run.host == host) if host else query)
        return [RunView.model_validate(row) for row in rows]


def mark_lost(run_id: str, why: str, attempt: int | None = None) -> bool:
    """End a run whose processes are known to be gone, and free its slot.

    A run that was asked to stop has stopped: it ends cancelled. False if it had ended already,
    or is in another attempt than `attempt` by now.
    """
    error = Unavailable(
        f"the run was lost: {why}", where=f"run {run_id}", hint="see its log; run it again"
    ).as_dict()
    with writing() as session:
        run = session.get(Run, run_id, with_for_update=True)
        if run is not None and run.state is RunState.CANCELLING:
            state, said, expected = RunState.CANCELLED, None, RunState.CANCELLING
        else:
            state, said, expected = RunState.LOST, error, RunState.RUNNING
        marked = end(session, run_id, state, said, expected=(expected,), attempt=attempt)
    if marked:
        logger.warning("run %s is lost: %s", run_id, why)
        wake_ready()
    return marked


def requeue(run_id: str) -> bool:
    """Queue a lost run again if its kind can resume and it has attempts left; else False."""
    with writing() as session:
        run = session.get(Run, run_id)
        if run is None or run.state is not RunState.LOST or not can_requeue(run):
            return False
        why = (run.error or {}).get("message", "it was lost")
        queued = _queue_again(session, run_id, f"queued again after attempt {run.attempt}: {why}")
    if queued:
        wake([run_id])
    return queued


def hand_back(run_id: str, why: str, attempt: int | None = None) -> bool:
    """Queue a running run again whose worker was told to end; the attempt does not count.

    False if it was asked to stop meanwhile, had ended, or is in another attempt by now.
    """
    with writing() as session:
        run = session.get(Run, run_id, with_for_update=True)
        if run is None or run.state is not RunState.RUNNING:
            return False
        if attempt not in (None, run.attempt):
            return False
        run.attempt -= 1  # first: an ended last attempt would fail the runs that need this one
        session.flush()
        end(session, run_id, RunState.LOST)
        _queue_again(session, run_id, f"queued again: {why}")
    wake([run_id])
    return True


def _queue_again(session: Session, run_id: str, text: str) -> bool:
    return move(
        session,
        run_id,
        (RunState.LOST,),
        RunState.QUEUED,
        finished_at=None,
        woken_at=None,
        heartbeat_at=None,
        progress_text=text,
    )
