"""`python -m workers.serve`: a server in the foreground, without store or broker.

`DeployParams` as JSON on stdin, paths resolved. When the server answers, one line on stdout:
`{"endpoint": …, "served_name": …, "notes": […]}`; the server's own output goes to stderr. SIGINT
or SIGTERM ends it and leaves no process. An error is `{"error": {…}}` on stdout and exit status 1.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from contextlib import nullcontext
from typing import Any

from app.store.models import DeploymentPhase
from speculators_core.data import occupancy
from speculators_core.errors import SpeclabError, Stopped
from speculators_core.params import DeployParams, JobKind, parse_params
from workers.jobs.deploy import DRAIN_S
from workers.launch import plan, vllm_cache
from workers.server import Server

_LOOK_S = 0.25


def main() -> int:
    """Exit status: 0 stopped on request, 1 failed."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        serve(_params(), stop)
    except Stopped:
        return 0
    except SpeclabError as error:
        _tell({"error": error.as_dict()})
        return 1
    return 0


def serve(params: DeployParams, stop: threading.Event) -> None:
    """Run a server until `stop` is set. Raises what kept it from starting or ended it."""
    launch = plan(params)
    vllm = launch.engine == "vllm"  # outside the store no run tells who uses its cache
    with occupancy.occupy(vllm_cache(), {}) if vllm else nullcontext():
        server = Server(launch, sys.stderr.buffer)
        try:
            notes = server.wait_ready(_log_phase, stop.is_set)
            _tell(
                {
                    "endpoint": launch.endpoint,
                    "served_name": launch.served_name,
                    "notes": [*launch.notes, *notes],
                }
            )
            while not stop.wait(_LOOK_S):
                if not server.running:
                    raise server.failure()
        finally:
            if not server.stop(DRAIN_S):
                _log(f"something of process group {server.pgid} is still running")


def _params() -> DeployParams:
    try:
        values = json.load(sys.stdin)
    except ValueError as error:
        raise SpeclabError(f"stdin is no JSON: {error}") from error
    params = parse_params(JobKind.DEPLOY, values)
    assert isinstance(params, DeployParams)
    return params


def _tell(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _log(text: str) -> None:
    sys.stderr.write(f"[speclab] {text}\n")


def _log_phase(phase: DeploymentPhase) -> None:
    _log(phase.value)


if __name__ == "__main__":
    sys.exit(main())
