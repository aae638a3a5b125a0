"""The worker's Celery app with stand-in jobs: `celery -A tests.workers.stand_in_app worker`."""

from __future__ import annotations

from workers import tasks
from workers.celery_app import app

tasks.JOB_MODULE = "tests.workers.stand_in_job"

__all__ = ["app"]
