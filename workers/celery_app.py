"""The worker's Celery: its settings, and what happens when it starts and when it ends.

The broker only wakes workers up: messages are acknowledged at once, carry one run id and no
result. Never imports torch: jobs run in processes of their own.
"""

from __future__ import annotations

import logging
import mmap
from typing import Any

from celery import Celery, signals

from app.services import broker
from app.settings import settings
from workers import leases
from workers.reaper import Reaper

log = logging.getLogger(__name__)

_A_MONTH_S = 31 * 24 * 3600

app = Celery("speclab")
app.conf.update(
    broker_url=settings().celery_broker_url,
    broker_connection_retry_on_startup=True,
    # jobs last for days: no unacknowledged message may be sent again meanwhile
    broker_transport_options={
        "visibility_timeout": _A_MONTH_S,
        "socket_timeout": 30,
        "socket_keepalive": True,
    },
    result_backend=None,
    task_ignore_result=True,
    task_serializer="json",
    result_serializer="json",
    event_serializer="json",
    accept_content=["json"],
    task_default_queue=broker.QUEUE,
    task_acks_late=False,
    task_reject_on_worker_lost=False,
    task_send_sent_event=False,
    worker_disable_prefetch=True,
    worker_prefetch_multiplier=1,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    worker_hijack_root_logger=False,
    imports=("workers.tasks",),
)

# one byte that the pool's forked children share with the main process: 1 once it shuts down
_stopping = mmap.mmap(-1, 1)
_reaper = Reaper(leases.host_name())


def stopping() -> bool:
    """Whether this worker was asked to end; its jobs are then asked to stop."""
    return _stopping[0] == 1


@signals.celeryd_init.connect  # type: ignore[untyped-decorator]
def _fit_pool(conf: Any, **_: Any) -> None:
    """One process a slot, and one that still hears the wake-ups when all slots are taken."""
    conf.worker_concurrency = leases.host_slots().total + 1


@signals.worker_ready.connect  # type: ignore[untyped-decorator]
def _started(**_: Any) -> None:
    _reaper.start()


@signals.worker_shutting_down.connect  # type: ignore[untyped-decorator]
def _asked_to_end(**_: Any) -> None:
    _stopping[0] = 1


@signals.worker_shutdown.connect  # type: ignore[untyped-decorator]
def _ended(**_: Any) -> None:
    _reaper.stop()
