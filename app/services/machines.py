"""Whether the lab's machines could ever do a run, asked before it is queued."""

from __future__ import annotations

from sqlalchemy import case, func, select
from sqlalchemy.orm import Session

from app.store.models import Slot, SlotKind
from speculators_core.errors import InputError
from speculators_core.params import TrainParams


def require_machine(session: Session, params: TrainParams) -> None:
    """Raise `InputError` where no host known so far has as many GPUs as a training wants processes,
    or where it wants several machines. A host without GPUs runs any number; without any host known,
    one may come that can.
    """
    if params.nodes > 1:
        raise InputError(
            "a run has one machine: it can't be one of several nodes",
            where="nodes",
            hint="start `speclab train` on each machine by hand",
        )
    gpus = func.sum(case((Slot.kind == SlotKind.GPU, 1), else_=0))
    counts = session.scalars(select(gpus).group_by(Slot.host)).all()
    most = max(counts, default=0)
    if counts and all(counts) and params.processes > most:
        raise InputError(
            f"{params.processes} processes take a GPU each, and no machine of the lab has more "
            f"than {most}",
            where="processes",
            hint=f"{most} at most",
        )
