"""One module a job kind, `workers/jobs/KIND.py`, with the function `run` that does the work.

A job is handed its run, its parameters with references resolved to paths, and a reporter; it
returns the run's result (docs/architecture.md names the keys) or raises a `SpeclabError`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

from app.services.views import RunView
from speculators_core.params import JobKind
from workers.reporter import Reporter

Job = Callable[[RunView, Any, Reporter], dict[str, Any]]


def job_of(kind: JobKind) -> Job:
    """The function of a kind; only the module that is needed is imported."""
    return cast(Job, import_module(f"workers.jobs.{kind.value}").run)
