"""How a run moves from state to state: compare-and-set inside the caller's write transaction.

    queued ──> running ──> succeeded | failed
      │           ├──> cancelling ──> cancelled | succeeded | failed
      │           └──> lost ──> queued (kinds that can resume, a few times)
      ├──> cancelled
      └──> failed (a run that it needs did not succeed)

Whoever comes late changes nothing, is told so (False), and is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from sqlalchemy import and_, or_, select, update
from sqlalchemy.orm import Session, aliased

from app.settings import settings
from app.store.models import Deployment, Run, RunDependency, RunState, Slot, now
from speculators_core.errors import Conflict
from speculators_core.params import JobKind

logger = logging.getLogger(__name__)

ACTIVE = frozenset({RunState.RUNNING, RunState.CANCELLING})
RESUMABLE = frozenset(JobKind) - {JobKind.DEPLOY}
"""Kinds that go on, or start over without harm, after their process died."""


def move(
    session: Session,
    run_id: str,
    expected: Collection[RunState],
    to: RunState,
    *,
    of_attempt: int | None = None,
    **values: Any,
) -> bool:
    """Set the state (and `values`) if the run is in one of `expected`; False if it is not.

    `of_attempt`: nor if it is in another attempt by now (it was lost, and queued again).
    """
    same = [Run.attempt == of_attempt] if of_attempt is not None else []
    changed = session.execute(
        update(Run)
        .where(Run.id == run_id, Run.state.in_(expected), *same)
        .values(state=to, updated_at=now(), **values)
        .execution_options(synchronize_session=False)
    )
    if changed.rowcount == 1:  # type: ignore[attr-defined]
        return True
    found = session.execute(select(Run.state, Run.attempt).where(Run.id == run_id)).first()
    logger.warning(
        "late write refused: run %s should become %s from %s, but it is %s",
        run_id,
        to.value,
        "|".join(sorted(expected)),
        f"{found[0].value} in attempt {found[1]}" if found else "not in the store",
    )
    return False


def end(
    session: Session,
    run_id: str,
    state: RunState,
    error: dict[str, Any] | None = None,
    expected: Collection[RunState] = ACTIVE,
    attempt: int | None = None,
) -> bool:
    """End a run: its slot is free, its deployment is out of reach, its dependents hear of it."""
    whole = {"progress": 1.0} if state is RunState.SUCCEEDED else {}
    ended = move(
        session,
        run_id,
        expected,
        state,
        of_attempt=attempt,
        error=error,
        finished_at=now(),
        eta_s=None,
        **whole,
    )
    if not ended:
        return False
    session.execute(
        update(Slot)
        .where(Slot.run_id == run_id)
        .values(run_id=None, taken_at=None, heartbeat_at=None)
        .execution_options(synchronize_session=False)
    )
    session.execute(
        update(Deployment)
        .where(Deployment.run_id == run_id)
        .values(phase=None, endpoint=None)
        .execution_options(synchronize_session=False)
    )
    fail_dependents(session)
    return True


def can_requeue(run: Run) -> bool:
    return run.kind in RESUMABLE and run.attempt < settings().max_attempts


def fail_dependents(session: Session) -> int:
    """Fail every queued run that needs one that will not succeed any more, transitively."""
    needed = aliased(Run)
    hopeless = or_(
        needed.state.in_((RunState.FAILED, RunState.CANCELLED)),
        and_(
            needed.state == RunState.LOST,
            or_(needed.kind.not_in(RESUMABLE), needed.attempt >= settings().max_attempts),
        ),
    )
    stuck = (
        select(Run.id, needed.id, needed.name, needed.state)
        .join(RunDependency, RunDependency.run_id == Run.id)
        .join(needed, needed.id == RunDependency.needs_id)
        .where(Run.state == RunState.QUEUED, hopeless)
    )
    failed = 0
    while rows := session.execute(stuck).all():
        for run_id, needs_id, name, state in {row[0]: row for row in rows}.values():
            error = Conflict(
                f"it needs run {needs_id} ({name}), which ended {state.value}",
                where=f"run {needs_id}",
                hint="correct that run's cause, run it again, then this one",
            )
            failed += move(
                session,
                run_id,
                (RunState.QUEUED,),
                RunState.FAILED,
                error=error.as_dict(),
                finished_at=now(),
            )
    return failed
