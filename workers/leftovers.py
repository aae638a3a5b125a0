"""What a run may leave behind when its job process dies: the job's group, and a server's: of a
deployment, or one that a training started for hidden states.

All are ended by recorded group and start time, so that a number that was reused is left alone.
Only the host that the run was on may ask: numbers mean nothing elsewhere.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import select, update

from app.services.views import RunView
from app.settings import settings
from app.store.engine import reading, writing
from app.store.models import Deployment, Run
from workers.processes import end_group, group_alive

logger = logging.getLogger(__name__)

_GRACE_S = 2.0
Group = tuple[int, float]


def job_gone(run: RunView) -> bool:
    """Whether a job was started and nothing of its group runs any more."""
    group = _group(run.job_pgid, run.job_started)
    return group is not None and not group_alive(*group)


def end_leftovers(run_id: str, attempt: int) -> bool:
    """End the attempt's job group and its server; True when nothing of them is left.

    When the run is in another attempt by now, its processes are that one's and left alone.
    """
    job, server = _groups(run_id, attempt)
    gone = _end(run_id, job) and _end(run_id, server) and _end(run_id, _helper(run_id, attempt))
    if gone and server:
        _forget_server(run_id)
    if gone and job:
        _record(run_id).unlink(missing_ok=True)
    return gone


def recorder(run: RunView) -> Callable[[int, float], None]:
    """Remembers the server that a run's job starts beside its own work, in the run's directory."""

    def record(pgid: int, started: float) -> None:
        place = _record(run.id)
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.with_suffix(".partial")
        partial.write_text(json.dumps([run.attempt, pgid, started]))
        partial.rename(place)

    return record


def remembers_server(run_id: str) -> bool:
    """Whether `recorder` was used for the run, and nobody has looked after its server since."""
    return _record(run_id).exists()


def _helper(run_id: str, attempt: int) -> Group | None:
    """What `recorder` remembers of this attempt."""
    try:
        of_attempt, pgid, started = json.loads(_record(run_id).read_text())
    except (OSError, ValueError):
        return None
    return _group(pgid, started) if of_attempt == attempt else None


def _record(run_id: str) -> Path:
    return settings().run_dir(run_id) / "server.json"


def _end(run_id: str, group: Group | None) -> bool:
    if group is None or not group_alive(*group):
        return True
    logger.warning("run %s left process group %d running: ending it", run_id, group[0])
    return end_group(*group, _GRACE_S)


def _groups(run_id: str, attempt: int) -> tuple[Group | None, Group | None]:
    """The recorded groups of the job and of the server."""
    query = (
        select(Run.job_pgid, Run.job_started, Deployment.server_pgid, Deployment.server_started)
        .outerjoin(Deployment, Deployment.run_id == Run.id)
        .where(Run.id == run_id, Run.attempt == attempt)
    )
    with reading() as session:
        row = session.execute(query).one_or_none()
    if row is None:
        return None, None
    return _group(row[0], row[1]), _group(row[2], row[3])


def _group(pgid: int | None, started: float | None) -> Group | None:
    return (pgid, started) if pgid and started else None


def _forget_server(run_id: str) -> None:
    with writing() as session:
        session.execute(
            update(Deployment)
            .where(Deployment.run_id == run_id)
            .values(server_pgid=None, server_started=None)
        )
