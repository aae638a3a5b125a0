"""The job process, `python -m workers.job RUN_ID`: does the work of one run and leaves its outcome.

Exit statuses: 0 done, 1 failed (`outcome.json` says why), 3 stopped on request (SIGTERM). It is
killed when its supervisor ends. What it prints is the run's log.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.services import references, runs
from speculators_core.errors import SpeclabError, Stopped, Unavailable
from speculators_core.lifeline import die_with_parent
from speculators_core.models.hub import snapshot
from speculators_core.params import JobKind, Params, parse_params
from speculators_core.progress import Progress
from workers import outcome
from workers.jobs import Job, job_of
from workers.reporter import Reporter

log = logging.getLogger("job")

SUPERVISOR = "SPECLAB_SUPERVISOR"
"""Environment variable with the pid of the process that watches this one."""
ATTEMPT = "SPECLAB_ATTEMPT"
"""Environment variable with the number of the attempt that this process is."""
_MODELS = frozenset({"verifier", "speculator"})  # a checkpoint's hub id is the converter's affair


def main(arguments: list[str], find_job: Callable[[JobKind], Job] = job_of) -> int:
    """Run one job to its end; the exit status."""
    if SUPERVISOR in os.environ:
        die_with_parent(int(os.environ[SUPERVISOR]))
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s", force=True)
    if len(arguments) != 1:
        log.error("usage: python -m workers.job RUN_ID, found %s", arguments)
        return 2
    attempt = os.environ.get(ATTEMPT)
    reporter = Reporter(arguments[0], int(attempt) if attempt else None)
    signal.signal(signal.SIGTERM, lambda *_: reporter.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return _conclude(reporter, lambda: _work(reporter, find_job))


def _conclude(reporter: Reporter, work: Callable[[], dict[str, Any]]) -> int:
    """Whatever happens in the work becomes an outcome that a person can read."""
    try:
        with reporter:
            outcome.write_result(reporter.run_id, work())
        return outcome.DONE
    except Stopped as stopped:
        log.info("stopped: %s", stopped)
        return outcome.STOPPED
    except SpeclabError as error:
        log.exception("failed: %s", error)
        outcome.write_error(reporter.run_id, error.as_dict())
    except Exception as error:
        log.exception("failed")
        outcome.write_error(reporter.run_id, _explained(error))
    return outcome.FAILED


def _work(reporter: Reporter, find_job: Callable[[JobKind], Job]) -> dict[str, Any]:
    run = reporter.insist(lambda: runs.get(reporter.run_id))
    finished = outcome.finished_result(run.id)
    if finished is not None:
        reporter.note("an earlier attempt finished this work; its result is kept")
        return finished
    params = reporter.insist(lambda: resolved(run.kind, run.params, reporter))
    outcome.write_params(run.id, params.model_dump(mode="json"))
    return find_job(run.kind)(run, params, reporter)


def resolved(kind: JobKind, values: dict[str, Any], progress: Progress | None = None) -> Params:
    """The parameters of a run with names, outputs of runs and hub ids replaced by paths."""
    found = references.resolve_params(kind, values)
    is_named_only = kind is JobKind.EXPORT or (
        kind is JobKind.REGENERATE and found.get("endpoint") is not None
    )  # looked at alone, or at work elsewhere
    wanted = _MODELS - {"verifier"} if is_named_only else _MODELS
    for field in wanted & found.keys():
        if found[field] is not None and not Path(found[field]).is_absolute():
            found[field] = str(snapshot(found[field], progress=progress))
    return parse_params(kind, found)


def _explained(error: Exception) -> dict[str, str | None]:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return Unavailable(
            "the disk is full", where=error.filename, hint="free some space and run it again"
        ).as_dict()
    return {
        "kind": "internal",
        "message": f"an unexpected error ended the job: {type(error).__name__}: {error}",
        "where": None,
        "hint": "the run's log has the details",
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
