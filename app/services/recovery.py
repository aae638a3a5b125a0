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


def lose(run_id: str, why: str, attempt: int | None = None) -> RunState | None:
    """End a run whose processes are known to be gone, and free its slot; the state it is in then.

    Queued again, if its kind can resume and it has attempts left: in the same transaction, so that
    whoever is killed here forgets no run. Cancelled, if it was asked to stop: it has stopped. Else
    lost. None if it had ended already, or is in another attempt than `attempt` by now.
    """
    with writing() as session:
        run = session.get(Run, run_id, with_for_update=True)
        if run is None or run.state not in ACTIVE or attempt not in (None, run.attempt):
            return None
        again = run.state is RunState.RUNNING and can_requeue(run)
        after = f"queued again after attempt {run.attempt}: {why}"
        state = _lost(session, run, why)
        if again:
            _queue_again(session, run_id, after)
    logger.warning("run %s is lost: %s", run_id, why)
    if again:
        wake([run_id])
    wake_ready()
    return RunState.QUEUED if again else state


def _lost(session: Session, run: Run, why: str) -> RunState:
    if run.state is RunState.CANCELLING:
        end(session, run.id, RunState.CANCELLED, expected=(RunState.CANCELLING,))
        return RunState.CANCELLED
    error = Unavailable(
        f"the run was lost: {why}", where=f"run {run.id}", hint="see its log; run it again"
    )
    end(session, run.id, RunState.LOST, error.as_dict(), expected=(RunState.RUNNING,))
    return RunState.LOST


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
