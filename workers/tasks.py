"""The one Celery task: claim a run, supervise it, claim the next, until nothing can start.

A message wakes a worker up and nothing more: the run that it names may be another's by now.
"""

from __future__ import annotations

import logging

from app.services import broker, claims
from speculators_core.errors import Unavailable
from workers import leases
from workers.celery_app import app, stopping
from workers.supervision import supervise

logger = logging.getLogger(__name__)

JOB_MODULE = "workers.job"


@app.task(name=broker.EXECUTE)  # type: ignore[untyped-decorator]
def execute(hint: str) -> None:
    """Work through the queue. `hint`: the run whose submission sent the message."""
    while not stopping():
        try:
            claim = claims.claim(leases.host_name())
        except Unavailable as error:
            logger.warning("woken for run %s, but %s", hint, error)
            return  # the reaper rings again
        if claim is None:
            return
        supervise(claim, stopping, JOB_MODULE)
