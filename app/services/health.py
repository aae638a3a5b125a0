"""Whether the lab works right now: for the pages' banner, `/healthz` and `speclab status`."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime, timedelta

import redis
from pydantic import computed_field
from sqlalchemy import func, select

from app.services import broker, slots
from app.services.views import SlotView, View
from app.settings import settings
from app.store.engine import reading
from app.store.models import Run, RunState, now
from speculators_core.errors import Unavailable


class PartHealth(View):
    """One part: whether it answers, else what it said."""

    ok: bool
    message: str = ""


class WorkerHealth(View):
    """A host that runs jobs. `alive`: it has shown itself lately."""

    host: str
    seen_at: datetime
    alive: bool
    slots: int
    taken: int


class Health(View):
    """`ok`: people can use the lab; `working`: and its runs make progress."""

    store: PartHealth
    broker: PartHealth
    workers: tuple[WorkerHealth, ...] = ()
    queued: int = 0
    running: int = 0

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ok(self) -> bool:
        return self.store.ok and self.broker.ok

    @computed_field  # type: ignore[prop-decorator]
    @property
    def working(self) -> bool:
        return self.ok and any(worker.alive for worker in self.workers)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def complaint(self) -> str:
        """One sentence for the banner; empty when all is well."""
        if not self.store.ok:
            return f"The store does not answer: {self.store.message}"
        if not self.broker.ok:
            return f"The broker does not answer, so new runs start late: {self.broker.message}"
        if not self.working:
            return "No worker is alive: runs stay queued until one is started."
        return ""


def check() -> Health:
    """Ask each part. Takes seconds at most, and never raises for a part that is away."""
    bell = _broker()
    if not settings().has_store:
        return Health(store=PartHealth(ok=False, message="there is none yet"), broker=bell)
    try:
        with reading() as session:
            rows = session.execute(
                select(Run.state, func.count())
                .where(Run.state.in_((RunState.QUEUED, RunState.RUNNING, RunState.CANCELLING)))
                .group_by(Run.state)
            )
            counts: dict[RunState, int] = {row[0]: row[1] for row in rows}
        workers = _workers(slots.list_slots())
    except Unavailable as error:
        return Health(store=PartHealth(ok=False, message=error.message), broker=bell)
    queued = counts.pop(RunState.QUEUED, 0)
    return Health(
        store=PartHealth(ok=True),
        broker=bell,
        workers=workers,
        queued=queued,
        running=sum(counts.values()),
    )


def _broker() -> PartHealth:
    try:
        broker.client().ping()
    except (redis.RedisError, OSError) as error:
        return PartHealth(ok=False, message=str(error))
    return PartHealth(ok=True)


def _workers(found: list[SlotView]) -> tuple[WorkerHealth, ...]:
    silent_since = now() - timedelta(seconds=settings().lost_after_seconds)
    by_host: dict[str, list[SlotView]] = defaultdict(list)
    for slot in found:
        by_host[slot.host].append(slot)
    return tuple(
        WorkerHealth(
            host=host,
            seen_at=(seen_at := max(slot.host_seen_at for slot in held)),
            alive=seen_at > silent_since,
            slots=len(held),
            taken=sum(slot.run_id is not None for slot in held),
        )
        for host, held in sorted(by_host.items())
    )
