"""Slots: what a host can run at once, a GPU each, or jobs and deployments on its CPU."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from app.services.views import SlotView
from app.store.engine import reading, serialise, writing
from app.store.models import Run, Slot, SlotKind, now
from app.store.transitions import ACTIVE
from speculators_core.params import JobKind

_NEVER_ON_GPU = frozenset(
    {JobKind.VERIFIER, JobKind.PREPARE, JobKind.EXPORT, JobKind.PULL, JobKind.PUSH}
)


def register_slots(host: str, gpus: Iterable[int], job_slots: int, serving_slots: int) -> None:
    """Say what this host offers now, and that it is alive; call it again as a heartbeat.

    A host with GPUs serves on them alone, so it has no serving slots. Free slots that it does
    not offer any more are dropped, held ones stay until they are free.
    """
    offered = _offered(host, sorted(set(gpus)), job_slots, serving_slots)
    moment = now()
    with writing() as session:
        serialise(session, f"slots {host}")
        known = {slot.id: slot for slot in session.scalars(select(Slot).where(Slot.host == host))}
        for slot_id, (kind, device) in offered.items():
            if slot_id not in known:
                session.add(Slot(id=slot_id, host=host, kind=kind, device=device))
        session.execute(update(Slot).where(Slot.host == host).values(host_seen_at=moment))
        session.execute(
            delete(Slot).where(
                Slot.host == host, Slot.run_id.is_(None), Slot.id.not_in(list(offered))
            )
        )


def list_slots(host: str | None = None) -> list[SlotView]:
    """All slots of the lab, or of one host."""
    with reading() as session:
        query = select(Slot).order_by(Slot.host, Slot.kind, Slot.device)
        rows = session.scalars(query.where(Slot.host == host) if host else query)
        return [SlotView.model_validate(row) for row in rows]


def free_stale_slots(host: str | None = None) -> list[str]:
    """Free slots whose run is not running any more; their ids."""
    living = select(Run.id).where(Run.state.in_(ACTIVE))
    with writing() as session:
        query = select(Slot.id).where(Slot.run_id.is_not(None), Slot.run_id.not_in(living))
        stale = session.scalars(query.where(Slot.host == host) if host else query).all()
        session.execute(
            update(Slot)
            .where(Slot.id.in_(stale), Slot.run_id.not_in(living))
            .values(run_id=None, taken_at=None, heartbeat_at=None)
        )
    return list(stale)


def kinds_by_slot(session: Session, host: str) -> dict[JobKind, SlotKind]:
    """Which kind of slot each kind of run takes on this host."""
    gpu = select(Slot.id).where(Slot.host == host, Slot.kind == SlotKind.GPU).limit(1)
    if session.scalar(gpu):
        return {kind: SlotKind.JOBS if kind in _NEVER_ON_GPU else SlotKind.GPU for kind in JobKind}
    return {kind: SlotKind.SERVING if kind is JobKind.DEPLOY else SlotKind.JOBS for kind in JobKind}


def _offered(
    host: str, gpus: list[int], job_slots: int, serving_slots: int
) -> dict[str, tuple[SlotKind, int]]:
    devices = {
        SlotKind.GPU: gpus,
        SlotKind.JOBS: list(range(job_slots)),
        SlotKind.SERVING: [] if gpus else list(range(serving_slots)),
    }
    return {
        f"{host}/{kind.value}:{device}": (kind, device)
        for kind, indices in devices.items()
        for device in indices
    }
