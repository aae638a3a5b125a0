"""Makes the store agree with what really runs: a thread of the worker, every few seconds.

A run of this host that has gone silent is ended, processes first, and queued again if its kind
can resume. Silence is judged twice: the heartbeat must be old by the clock, or the job's process
gone, *and* no beat may come while the reaper looks. So a store that was away for a minute, or a
clock that was set, costs no run.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

from sqlalchemy import func, or_, select

from app.services import caches, claims
from app.services.views import RunView
from app.settings import settings
from app.store.engine import reading
from app.store.models import ENDED, Deployment, Run, now
from app.store.transitions import ACTIVE
from speculators_core.errors import Unavailable
from workers import leases
from workers.leftovers import end_leftovers, job_gone, remembers_server
from workers.log import note
from workers.processes import living_groups

logger = logging.getLogger(__name__)

SWEEP_BEATS = 2.5
"""Heartbeats between two sweeps: 5 s with the default settings."""
_SILENT_BEATS = 4
"""Beats that must stay out while the reaper looks; a supervisor concludes its run within them."""
HOST_GONE_S = 3600.0
"""Silence of a host after which others take its runs over; its own workers have given up by then
(`supervision.ISOLATED_AFTER_S`)."""
_LOOK_BACK = timedelta(days=1)
_PARTIAL_IDLE_S = 600.0
_CLEAN_EVERY_S = 3600.0
_OUTPUT_FOLDERS = ("verifiers", "datasets", "speculators")
_Sign = tuple[int, datetime | None]


class Reaper:
    """One a host. `sweep` may be called by hand; `start` and `stop` run it in a thread."""

    def __init__(self, host: str) -> None:
        self.host = host
        self._every_s = SWEEP_BEATS * settings().heartbeat_seconds
        self._first_seen: dict[str, tuple[_Sign, float]] = {}
        self._clean_at = 0.0  # time.monotonic() of the next look at caches
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._sweep_on, name="reaper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ending.set()
        if self._thread.is_alive():  # not in a worker that never got ready
            self._thread.join(self._every_s)

    def sweep(self) -> None:
        """One round; a step that fails is logged and does not keep the others from theirs."""
        steps: tuple[Callable[[], object], ...] = (
            leases.register,
            self.reap_silent_runs,
            self.end_orphans,
            self.take_over_from_gone_hosts,
            lambda: claims.free_stale_slots(self.host),
            lambda: claims.wake(claims.unwoken(2 * self._every_s)),
            self.remove_partial_outputs,
            self.clean_caches,
        )
        for step in steps:
            try:
                step()
            except Unavailable as error:
                logger.warning("the reaper waits for the store: %s", error)
                return
            except Exception:
                logger.exception("a step of the reaper failed")

    def reap_silent_runs(self) -> None:
        """End this host's runs whose supervisor or job died."""
        running = claims.lost_runs(self.host, 0.0)
        self._first_seen = {
            run.id: self._first_seen[run.id] for run in running if run.id in self._first_seen
        }
        for run in running:
            if self._watched_s(run) >= _SILENT_BEATS * settings().heartbeat_seconds and (
                job_gone(run) or (run.heartbeat_age or 0.0) >= settings().lost_after_seconds
            ):
                self._reap(run)

    def end_orphans(self) -> None:
        """End processes of runs that have ended: their supervisor died between the two."""
        query = (
            select(Run.id, Run.attempt, Run.job_pgid, Deployment.server_pgid)
            .outerjoin(Deployment, Deployment.run_id == Run.id)
            .where(
                Run.host == self.host,
                Run.state.in_(ENDED),
                or_(
                    Deployment.server_pgid.is_not(None),
                    Run.job_pgid.is_not(None) & (Run.finished_at > now() - _LOOK_BACK),
                ),
            )
        )
        with reading() as session:
            ended = session.execute(query).all()
        living = living_groups() if ended else set()
        for run_id, attempt, job_pgid, server_pgid in ended:
            if job_pgid in living or server_pgid is not None or remembers_server(run_id):
                end_leftovers(run_id, attempt)

    def take_over_from_gone_hosts(self) -> None:
        """Queue again what other hosts ran when they vanished."""
        seen = {slot.host: slot.host_seen_at for slot in claims.list_slots()}
        limit = now() - timedelta(seconds=HOST_GONE_S)
        for run in claims.lost_runs(None, HOST_GONE_S):
            if run.host != self.host and (run.host is None or seen.get(run.host, limit) <= limit):
                claims.lose(
                    run.id,
                    f"its host {run.host} has not been seen for {HOST_GONE_S / 60:.0f} min",
                    run.attempt,
                )

    def remove_partial_outputs(self) -> None:
        """Remove half-written outputs that no running job can be writing."""
        with reading() as session:
            oldest = session.scalar(select(func.min(Run.started_at)).where(Run.state.in_(ACTIVE)))
        idle = time.time() - _PARTIAL_IDLE_S
        before = min(idle, oldest.timestamp()) if oldest else idle
        for folder in _OUTPUT_FOLDERS:
            for pattern in (".*.partial", ".*.old"):
                for partial in (settings().home / folder).glob(pattern):
                    if _last_written(partial) < before:
                        logger.info("removing %s, which nobody finished", partial)
                        shutil.rmtree(partial, ignore_errors=True)

    def clean_caches(self) -> None:
        """Once an hour, remove caches that are older than the setting allows."""
        days = settings().cache_days
        if days is None or time.monotonic() < self._clean_at:
            return
        self._clean_at = time.monotonic() + _CLEAN_EVERY_S
        for cache in caches.clean(days):
            logger.info("removed %s, unused for %g days: %s", cache.path, days, cache.about)

    def _reap(self, run: RunView) -> None:
        if not end_leftovers(run.id, run.attempt):
            logger.error("run %s: its processes can't be ended yet, trying again", run.id)
            return
        age = f"{run.heartbeat_age:.0f} s" if run.heartbeat_age is not None else "ever"
        why = f"its worker on {run.host} died (no sign of life for {age})"
        claims.lose(run.id, why, run.attempt)
        note(run.id, f"attempt {run.attempt} was lost: {why}")

    def _watched_s(self, run: RunView) -> float:
        """How long this reaper has seen the same last sign of life."""
        sign = (run.attempt, run.heartbeat_at)
        known, since = self._first_seen.get(run.id, (None, 0.0))
        if known != sign:
            self._first_seen[run.id] = (sign, time.monotonic())
            return 0.0
        return time.monotonic() - since

    def _sweep_on(self) -> None:
        while True:
            self.sweep()
            if self._ending.wait(self._every_s):
                return


def _last_written(directory: Path) -> float:
    """The newest change anywhere in a directory (Unix time); now, where it changes as we look."""
    try:
        return max(p.lstat().st_mtime for p in (directory, *directory.rglob("*")))
    except OSError:
        return time.time()
