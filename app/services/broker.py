"""The broker: a bell that wakes workers, and the stream that carries traces.

Nothing here is the truth. A wake-up that can't be sent is logged and sent again by the reaper.
"""

from __future__ import annotations

import logging
from functools import lru_cache

import redis
from celery import Celery

from app.settings import settings

logger = logging.getLogger(__name__)

EXECUTE = "speclab.execute"
QUEUE = "runs"
_CONNECT_SECONDS = 1.0
_ANSWER_SECONDS = 5.0


def wake(run_id: str) -> bool:
    """Ring for a worker. False when the broker is away (at most a few seconds later)."""
    try:
        _celery(settings().celery_broker_url).send_task(
            EXECUTE, args=[run_id], queue=QUEUE, ignore_result=True, retry=False
        )
    except Exception as error:  # kombu, redis and socket errors have no common base
        logger.warning("the broker is away, run %s waits for the reaper: %s", run_id, error)
        return False
    return True


def client() -> redis.Redis:
    """A redis-py client of the broker; its calls raise `redis.RedisError` when it is away."""
    return _redis(settings().redis_url)


def trace_stream(deployment_id: str) -> str:
    """The stream that a deployment's trace records are on."""
    return f"trace:{deployment_id}"


@lru_cache(maxsize=4)
def _celery(url: str) -> Celery:
    sender = Celery("speclab", broker=url, set_as_current=False)
    sender.conf.update(
        task_serializer="json",
        broker_connection_timeout=_CONNECT_SECONDS,
        broker_connection_retry=False,
        broker_pool_limit=4,
        broker_transport_options={
            "socket_connect_timeout": _CONNECT_SECONDS,
            "socket_timeout": _ANSWER_SECONDS,
            "max_retries": 0,
        },
    )
    return sender


@lru_cache(maxsize=4)
def _redis(url: str) -> redis.Redis:
    return redis.Redis.from_url(
        url,
        socket_connect_timeout=_CONNECT_SECONDS,
        socket_timeout=_ANSWER_SECONDS,
        decode_responses=True,
    )
