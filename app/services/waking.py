"""Ringing for queued runs, and remembering for which the bell was rung."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from sqlalchemy import ColumnElement, exists, or_, select, update
from sqlalchemy.orm import aliased

from app.services import broker
from app.store.engine import reading, writing
from app.store.models import Run, RunDependency, RunState, now

_AT_ONCE = 16


def ready() -> ColumnElement[bool]:
    """Condition on `Run`: queued, and everything it needs has succeeded."""
    needed = aliased(Run)
    unmet = exists().where(
        RunDependency.run_id == Run.id,
        needed.id == RunDependency.needs_id,
        needed.state != RunState.SUCCEEDED,
    )
    return (Run.state == RunState.QUEUED) & ~unmet


def wake(run_ids: Iterable[str]) -> int:
    """Ring for each run; how many rings went out. The first that fails ends the attempt."""
    rung = []
    for run_id in run_ids:
        if not broker.wake(run_id):
            break
        rung.append(run_id)
    if rung:
        with writing() as session:
            session.execute(
                update(Run)
                .where(Run.id.in_(rung), Run.state == RunState.QUEUED)
                .values(woken_at=now(), updated_at=Run.updated_at)
                .execution_options(synchronize_session=False)
            )
    return len(rung)


def wake_ready() -> int:
    """Ring for the first runs that could start; done after anything that lets others start."""
    with reading() as session:
        query = select(Run.id).where(ready())
        ids = session.scalars(
            query.order_by(Run.priority.desc(), Run.created_at).limit(_AT_ONCE)
        ).all()
    return wake(ids)


def unwoken(older_than: float) -> list[str]:
    """Runs that could start and for which nobody rang in the last `older_than` seconds."""
    limit = now() - timedelta(seconds=older_than)
    silent = or_(Run.woken_at.is_(None), Run.woken_at < limit)
    with reading() as session:
        query = select(Run.id).where(ready(), silent)
        return list(session.scalars(query.order_by(Run.created_at).limit(_AT_ONCE)))
