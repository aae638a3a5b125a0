"""A deployment: starts a server, relays its trace, watches it, and leaves nothing behind."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from app.services import deployments, speculators, verifiers
from app.services.views import RunView
from app.store.models import DeploymentPhase, TraceMode
from speculators_core.errors import SpeclabError, Stopped, Unavailable
from speculators_core.params import DeployParams
from workers.jobs.places import name_of
from workers.launch import Launch, plan
from workers.metrics import Counters, scrape
from workers.reporter import Reporter
from workers.server import Server
from workers.trace_relay import TraceRelay, load_tokenizer

DRAIN_S = 7.0  # vLLM drains for 5 s by itself; the rest is its own way out
_LOOK_S = 0.25
_SETTLE_S = 1.0
_SCRAPE_S = 10.0
_SILENT_STEPS = 200  # drafting steps without a single acceptance that are no bad luck any more
_PHASES = {
    DeploymentPhase.STARTING: "starting the server",
    DeploymentPhase.LOADING: "loading the model",
    DeploymentPhase.WARMING: "asking for a first answer",
    DeploymentPhase.READY: "serving",
    DeploymentPhase.STOPPING: "stopping the server",
}


def run(run: RunView, params: DeployParams, reporter: Reporter) -> dict[str, Any]:
    """Serve until asked to stop. Never returns: raises `Stopped`, or why the server died.

    `params` has its references resolved to directories.
    """
    deployment = _Deployment(run.id, reporter)
    if params.speculator:  # what a run made was not known when this was submitted
        drafter = params.speculator
        reporter.insist(lambda: speculators.require_servable(drafter))
    with ExitStack() as stack:
        relay = None
        if params.trace:
            relay = TraceRelay(run.id, load_tokenizer(Path(params.verifier)))
            stack.callback(relay.close)
        launch = plan(params, relay.path if relay else None)
        for note in launch.notes:
            reporter.note(note)
        server = Server(launch, sys.stdout.buffer)
        stack.callback(deployment.end, server)
        deployment.begin(launch, server, params)
        notes = server.wait_ready(deployment.phase, reporter.stopping)
        deployment.announce(launch, notes)
        _watch(server, relay, reporter)
    raise Stopped("the deployment was stopped")


class _Deployment:
    """The deployment's row, written for as long as its run lives."""

    def __init__(self, run_id: str, reporter: Reporter) -> None:
        self._id = run_id
        self._reporter = reporter

    def begin(self, launch: Launch, server: Server, params: DeployParams) -> None:
        """First of all the process group: whoever finds this run dead must find its server."""
        self._update(server_pgid=server.pgid, server_started=server.started)
        verifier = self._reporter.insist(
            lambda: name_of(params.verifier, verifiers.list_verifiers())
        )
        self._update(
            verifier=verifier,
            speculator=self._drafter(params.speculator),
            command=list(launch.command),
            served_name=launch.served_name,
            speculative_tokens=launch.speculative_tokens,
            notes=list(launch.notes),
            trace_mode=TraceMode.OFF,
        )

    def phase(self, phase: DeploymentPhase) -> None:
        if phase is not DeploymentPhase.READY:  # that one comes with the endpoint, in `announce`
            self._reporter.update(None, _PHASES[phase])
            self._update(phase=phase)

    def announce(self, launch: Launch, notes: list[str]) -> None:
        """It answers: tell where."""
        for note in notes:
            self._reporter.note(note)
        self._update(
            phase=DeploymentPhase.READY,
            endpoint=launch.endpoint,
            trace_mode=launch.trace_mode,
            notes=[*launch.notes, *notes],
        )
        self._reporter.update(None, _PHASES[DeploymentPhase.READY])
        self._reporter.note(f"ready at {launch.endpoint}/v1 as {launch.served_name}")

    def end(self, server: Server) -> None:
        """Also when the store is away: the server goes first, the row is written if it can be."""
        if server.running:
            self._try(phase=DeploymentPhase.STOPPING, endpoint=None)
        if server.stop(DRAIN_S):
            self._try(server_pgid=None, server_started=None, endpoint=None)
        else:  # the recorded group stays, for the reaper to end
            self._reporter.note(f"something of the server's group {server.pgid} is still running")

    def _drafter(self, path: str | None) -> str | None:
        """As people know it; None for the n-gram drafter."""
        if path is None:
            return None
        return self._reporter.insist(lambda: name_of(path, speculators.list_speculators()))

    def _update(self, **changes: Any) -> None:
        self._reporter.insist(lambda: deployments.update(self._id, **changes))

    def _try(self, **changes: Any) -> None:
        try:
            deployments.update(self._id, **changes)
        except SpeclabError as error:
            self._reporter.note(f"not recorded: {error}")


def _watch(server: Server, relay: TraceRelay | None, reporter: Reporter) -> None:
    """Until asked to stop; raises when the server dies."""
    settle = _every(_SETTLE_S, relay.settle) if relay else lambda: None
    health = _every(_SCRAPE_S, lambda: _report_health(server, reporter))
    while not reporter.stopping():
        if not server.running:
            raise server.failure()
        settle()
        health()
        time.sleep(_LOOK_S)


def _every(seconds: float, action: Callable[[], None]) -> Callable[[], None]:
    """A function that does `action` when it was last done at least `seconds` ago."""
    last = time.monotonic()

    def now_and_then() -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            action()
            last = time.monotonic()

    return now_and_then


def _report_health(server: Server, reporter: Reporter) -> None:
    try:
        reporter.update(None, health_line(scrape(server.launch.endpoint)))
    except Unavailable as error:
        reporter.update(None, f"the server is slow to answer: {error.message}")


def health_line(counters: Counters) -> str:
    """One line for the run: load, and what has been accepted since the server started."""
    load = f"serving: {counters.running} running, {counters.waiting} waiting"
    length = counters.acceptance_length
    if length is None:
        return f"{load}; nothing drafted yet"
    if not counters.accepted and counters.steps > _SILENT_STEPS:
        return f"{load}; none of {counters.drafted} drafted tokens was accepted: something is wrong"
    return f"{load}; acceptance length {length:.2f} over {counters.steps} steps"
