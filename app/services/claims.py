"""The life of a running run, as its worker tells it: claim, beat, report, finish.

A run is claimed together with its slot in one write transaction; both updates are conditional,
and claims are one at a time in the lab, so no run and no slot ever has two holders. A training of
several processes takes as many GPUs, all at once or none.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, delete, func, or_, select, true, update
from sqlalchemy.orm import Session, aliased

from app.services.recovery import lose, lost_runs
from app.services.slots import free_stale_slots, kinds_by_slot, list_slots, register_slots
from app.services.views import View
from app.services.waking import ready, unwoken, wake, wake_ready
from app.store.engine import reading, serialise, writing
from app.store.models import Run, RunMetric, RunState, Slot, SlotKind, now
from app.store.transitions import ACTIVE, end, fail_dependents, move
from speculators_core.errors import NotFound
from speculators_core.params import JobKind

__all__ = [
    "Claim",
    "add_metrics",
    "beat",
    "claim",
    "finish",
    "free_stale_slots",
    "list_slots",
    "lose",
    "lost_runs",
    "progress",
    "register_slots",
    "set_job",
    "set_result",
    "state",
    "unwoken",
    "wake",
    "wake_ready",
]

logger = logging.getLogger(__name__)


class Claim(View):
    """A run and the slots it runs in, the first of which names it. `devices`: the GPUs' indices;
    none on a CPU slot."""

    run_id: str
    kind: JobKind
    slot_id: str
    devices: tuple[int, ...]
    attempt: int


def claim(host: str) -> Claim | None:
    """Take the first run that can start on this host now, with its slot; None if there is none.

    Order: priority, deployments that take over from another, owners with fewer running runs,
    age. A run that replaces a deployment asks it to stop here, and is claimed once it has ended.
    """
    with writing() as session:
        serialise(session, "claims")
        fail_dependents(session)
        _make_way(session, host)
        free = _free_slots(session, host)
        run = _first(session, free)
        return _take(session, run, _wanted(run, free[run.kind]), host) if run else None


def beat(run_id: str, attempt: int | None = None) -> RunState:
    """A sign of life of the run and its slot; the state, so that a wish to cancel is heard.

    `attempt` is the claim's: when the run was lost and is in another attempt by now, whoever
    beats for the old one hears `lost` and keeps nothing alive.
    """
    moment = now()
    mine = _attempt(run_id, attempt)
    with writing() as session:
        session.execute(
            update(Run)
            .where(*mine, Run.state.in_(ACTIVE))
            .values(heartbeat_at=moment, updated_at=moment)
        )
        session.execute(
            update(Slot)
            .where(Slot.run_id == run_id, Slot.run_id.in_(select(Run.id).where(*mine)))
            .values(heartbeat_at=moment)
        )
        found = session.execute(select(Run.state, Run.attempt).where(Run.id == run_id)).first()
    if found is None:
        raise NotFound(f"there is no run {run_id!r}")
    return found[0] if attempt in (None, found[1]) else RunState.LOST


def state(run_id: str) -> RunState:
    """The state alone, cheaply. Raises `NotFound`."""
    with reading() as session:
        found = session.scalar(select(Run.state).where(Run.id == run_id))
    if found is None:
        raise NotFound(f"there is no run {run_id!r}")
    return found


def set_job(run_id: str, pgid: int, started: float, attempt: int | None = None) -> bool:
    """Record the job's process group and its leader's start time (clock ticks since boot).

    Like all reports: False (and logged) if the run, or this attempt, is not running any more.
    """
    return _report(run_id, attempt, job_pgid=pgid, job_started=started)


def progress(
    run_id: str,
    fraction: float | None,
    text: str,
    eta_s: float | None = None,
    attempt: int | None = None,
) -> bool:
    """How far the work is, 0 to 1; numbers that are not finite are unknown."""
    if fraction is not None:
        fraction = min(1.0, max(0.0, fraction)) if math.isfinite(fraction) else None
    if eta_s is not None and not math.isfinite(eta_s):
        eta_s = None
    line = text.replace("\x00", "\ufffd")
    return _report(run_id, attempt, progress=fraction, progress_text=line, eta_s=eta_s)


def set_result(run_id: str, result: Mapping[str, Any], attempt: int | None = None) -> bool:
    """The run's result (architecture.md names the keys of each kind)."""
    return _report(run_id, attempt, result=dict(result))


def add_metrics(
    run_id: str, steps: Mapping[int, Mapping[str, float]], attempt: int | None = None
) -> None:
    """Log steps; a step that is there already is replaced and gets a new id.

    With `attempt`: nothing (and that is logged) if the run is in another one by now.
    """
    if not steps:
        return
    rows = [
        RunMetric(run_id=run_id, step=step, values=dict(values))
        for step, values in sorted(steps.items())
    ]
    with writing() as session:
        if session.scalar(select(Run.id).where(*_attempt(run_id, attempt))) is None:
            _refused(run_id, "metrics")
            return
        session.execute(
            delete(RunMetric).where(RunMetric.run_id == run_id, RunMetric.step.in_(list(steps)))
        )
        session.add_all(rows)


def finish(
    run_id: str,
    state: RunState | str,
    error: Mapping[str, Any] | None = None,
    attempt: int | None = None,
) -> bool:
    """End a running run and free its slot; then ring for what can start now.

    False (and logged) if the run, or this attempt, is not running any more.
    """
    with writing() as session:
        ended = end(
            session, run_id, RunState(state), dict(error) if error else None, attempt=attempt
        )
    if ended:
        wake_ready()
    return ended


def _attempt(run_id: str, attempt: int | None) -> list[ColumnElement[bool]]:
    return [Run.id == run_id, *([Run.attempt == attempt] if attempt is not None else [])]


def _report(run_id: str, attempt: int | None, **values: Any) -> bool:
    with writing() as session:
        changed = session.execute(
            update(Run)
            .where(*_attempt(run_id, attempt), Run.state.in_(ACTIVE))
            .values(updated_at=now(), **values)
        )
    if changed.rowcount != 1:  # type: ignore[attr-defined]
        _refused(run_id, ", ".join(values))
        return False
    return True


def _refused(run_id: str, what: str) -> None:
    logger.warning("late report refused: run %s, or this attempt, is over (%s)", run_id, what)


def _make_way(session: Session, host: str) -> None:
    """Ask deployments to stop whose replacement is ready, where this host could run it."""
    old = aliased(Run)
    waiting = session.execute(
        select(Run, old.id, old.state)
        .join(old, old.id == Run.replaces_id)
        .where(ready(), old.state.in_((RunState.QUEUED, RunState.RUNNING)))
    ).all()
    for run, old_id, old_state in waiting:
        kind = _slot_kind(session, host, run.kind)
        room = select(Slot.id).where(
            Slot.host == host,
            Slot.kind == kind,
            Slot.run_id.is_(None) | (Slot.run_id == old_id),
        )
        if session.scalar(room.limit(1)) is None:
            continue
        logger.info("run %s takes over from deployment %s, which is asked to stop", run.id, old_id)
        if old_state is RunState.QUEUED:
            end(session, old_id, RunState.CANCELLED, expected=(RunState.QUEUED,))
        else:
            text = f"run {run.id} ({run.name}) takes over"
            move(session, old_id, (RunState.RUNNING,), RunState.CANCELLING, progress_text=text)


def _slot_kind(session: Session, host: str, kind: JobKind) -> SlotKind:
    return kinds_by_slot(session, host)[kind]


def _free_slots(session: Session, host: str) -> dict[JobKind, list[Slot]]:
    """For each kind of run that could start on this host now, the free slots it could take."""
    free: dict[SlotKind, list[Slot]] = {}
    rows = session.scalars(
        select(Slot).where(Slot.host == host, Slot.run_id.is_(None)).order_by(Slot.device)
    )
    for slot in rows:
        free.setdefault(slot.kind, []).append(slot)
    needed = kinds_by_slot(session, host)
    return {kind: free[slot] for kind, slot in needed.items() if slot in free}


def _first(session: Session, free: Mapping[JobKind, list[Slot]]) -> Run | None:
    if not free:
        return None
    old, running = aliased(Run), aliased(Run)
    busy = (
        select(running.owner, func.count().label("runs"))
        .where(running.state.in_(ACTIVE))
        .group_by(running.owner)
        .subquery()
    )
    return session.scalar(
        select(Run)
        .outerjoin(old, old.id == Run.replaces_id)
        .outerjoin(busy, busy.c.owner == Run.owner)
        .where(
            ready(),
            Run.kind.in_(list(free)),
            _fits(free),
            old.id.is_(None) | old.state.not_in((RunState.QUEUED, *ACTIVE)),
        )
        .order_by(
            Run.priority.desc(),
            Run.replaces_id.is_(None),
            func.coalesce(busy.c.runs, 0),
            Run.created_at,
            Run.id,
        )
        .limit(1)
    )


def _fits(free: Mapping[JobKind, list[Slot]]) -> ColumnElement[bool]:
    """Whether a run's processes, one a GPU, find GPUs enough; on a CPU they share one slot."""
    slots = free.get(JobKind.TRAIN, [])
    if not slots or slots[0].kind is not SlotKind.GPU:
        return true()
    processes = func.coalesce(Run.params["processes"].as_integer(), 1)
    return or_(Run.kind != JobKind.TRAIN, processes <= len(slots))


def _wanted(run: Run, free: list[Slot]) -> list[Slot]:
    """The slots that a run takes of the free ones."""
    several = run.kind is JobKind.TRAIN and free[0].kind is SlotKind.GPU
    return free[: int(run.params.get("processes") or 1) if several else 1]


def _take(session: Session, run: Run, slots: list[Slot], host: str) -> Claim | None:
    moment = now()
    attempt = run.attempt + 1
    taken = move(
        session,
        run.id,
        (RunState.QUEUED,),
        RunState.RUNNING,
        host=host,
        attempt=attempt,
        started_at=moment,
        heartbeat_at=moment,
        finished_at=None,
        progress=None,
        progress_text="starting",
        eta_s=None,
        error=None,
        job_pgid=None,
        job_started=None,
    )
    if not taken:
        return None  # cancelled between the look and the update
    session.execute(
        update(Slot)
        .where(Slot.id.in_([slot.id for slot in slots]), Slot.run_id.is_(None))
        .values(run_id=run.id, taken_at=moment, heartbeat_at=moment)
    )
    devices = tuple(slot.device for slot in slots if slot.kind is SlotKind.GPU)
    return Claim(
        run_id=run.id, kind=run.kind, slot_id=slots[0].id, devices=devices, attempt=attempt
    )
