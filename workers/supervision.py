"""Watching one job process from its start to its end, and concluding its run.

The supervisor beats the run's heart, hears a wish to cancel, ends the whole process group, and
writes how the run ended. While the store is away the job goes on and the conclusion waits.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from app.services import claims, recovery, runs
from app.services.claims import Claim
from app.settings import settings
from app.store.models import RunState
from app.store.transitions import ACTIVE
from speculators_core.errors import NotFound, Unavailable
from workers import leases, outcome
from workers.conclusion import Again, Ask, Conclusion, conclude, ending
from workers.job import ATTEMPT, SUPERVISOR
from workers.leftovers import end_leftovers
from workers.log import RunLog, last_meaningful_line, lines_of
from workers.processes import end_group, signal_group, start_time

logger = logging.getLogger(__name__)

ISOLATED_AFTER_S = 30 * 60
"""A job whose worker has not reached the store for so long is ended: half the time after which
other hosts take its run over (`reaper.HOST_GONE_S`), so that no run is executed twice at once."""
_LOOK_S = 0.1
_RETRY_S = 1.0
_LAST_TRIES = 5
_PUMP_WAIT_S = 2.0
_LEFTOVER_GRACE_S = 2.0


def supervise(claim: Claim, stopping: Callable[[], bool], module: str = "workers.job") -> None:
    """Execute a claimed run; when this returns the run has ended or is queued again."""
    supervision = _Supervision(claim, stopping)
    try:
        supervision.start(module)
        supervision.watch()
    except Exception as error:
        logger.exception("run %s: supervising failed", claim.run_id)
        supervision.end(settings().stop_grace_seconds)
        supervision.fail(f"the job could not be supervised: {error}")
    except BaseException:  # the pool's process is told to exit now
        supervision.ask = supervision.ask or Ask.WORKER_ENDS
        supervision.end(_LEFTOVER_GRACE_S)
        supervision.conclude()
        raise
    else:
        supervision.end(_LEFTOVER_GRACE_S)
        supervision.conclude()
    finally:
        supervision.close()


class _Supervision:
    def __init__(self, claim: Claim, stopping: Callable[[], bool]) -> None:
        self.claim = claim
        self.ask: Ask | None = None
        self._stopping = stopping
        self._log: RunLog | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._recorded = False
        self._kill_at = float("inf")
        self._heard = time.monotonic()

    def start(self, module: str) -> None:
        run_id = self.claim.run_id
        self._log = RunLog(runs.log_path(run_id))
        self._log.note(
            f"attempt {self.claim.attempt} starts on {self.claim.slot_id}, "
            f"CUDA_VISIBLE_DEVICES={','.join(map(str, self.claim.devices))}"
        )
        outcome.clear_error(run_id)
        self._child = subprocess.Popen(
            [sys.executable, "-m", module, run_id],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={
                **os.environ,
                **leases.device_environment(self.claim.devices),
                SUPERVISOR: str(os.getpid()),
                ATTEMPT: str(self.claim.attempt),
                "PYTHONUNBUFFERED": "1",
            },
        )
        # a child that nobody has waited for keeps its number, so this is its time or None
        self._started = start_time(self._child.pid) or 0.0
        assert self._child.stdout
        self._pump = threading.Thread(
            target=self._log.pump, args=(lines_of(self._child.stdout),), daemon=True
        )
        self._pump.start()

    def watch(self) -> None:
        """Until the job's process ends by itself or because it was asked to."""
        assert self._child
        next_beat = 0.0
        while self._child.poll() is None:
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + settings().heartbeat_seconds
                self._beat()
            if self._stopping():
                self._stop(Ask.WORKER_ENDS)
            if time.monotonic() >= self._kill_at:
                signal_group(self._child.pid, self._started, signal.SIGKILL)
            time.sleep(_LOOK_S)

    def end(self, grace_s: float) -> None:
        """Leave nothing of the job running: neither its group nor a server of its own."""
        if self._child is None:
            return
        end_group(self._child.pid, self._started, grace_s)
        self._child.wait()
        self._beat()  # ending takes its time, and the reaper must not take it for silence
        try:
            end_leftovers(self.claim.run_id, self.claim.attempt)
        except Unavailable:
            logger.warning("run %s: its leftovers wait for the reaper", self.claim.run_id)
        self._beat()
        self._pump.join(_PUMP_WAIT_S)

    def conclude(self) -> None:
        """Write how the run ended, however long the store is away."""
        if not self._insist(self._still_ours):
            self._note("the run is not this attempt's any more; it is left as it is")
            return
        assert self._child and self._log
        status = self._child.returncode
        conclusion = conclude(
            self.claim.kind,
            self.claim.attempt,
            status,
            self.ask,
            outcome.read_outcome(self.claim.run_id),
            last_meaningful_line(self._log.last_lines),
        )
        self._note(f"attempt {self.claim.attempt} over, {ending(status)}: {_told(conclusion)}")
        self._insist(lambda: _write(self.claim, conclusion))

    def fail(self, why: str) -> None:
        error = {"kind": "internal", "message": why, "where": None, "hint": "see the worker's log"}
        run_id, attempt = self.claim.run_id, self.claim.attempt
        self._insist(lambda: claims.finish(run_id, RunState.FAILED, error, attempt=attempt))

    def close(self) -> None:
        if self._log:
            self._log.close()

    def _beat(self) -> None:
        run_id, attempt = self.claim.run_id, self.claim.attempt
        try:
            if not self._recorded:
                assert self._child
                claims.set_job(run_id, self._child.pid, self._started, attempt=attempt)
                self._recorded = True
            state = claims.beat(run_id, attempt=attempt)
        except NotFound:
            self._stop(Ask.TAKEN_AWAY)
        except Unavailable as error:
            logger.warning("run %s goes on without the store: %s", self.claim.run_id, error)
            if time.monotonic() - self._heard > ISOLATED_AFTER_S:
                self._stop(Ask.ISOLATED)
        else:
            self._heard = time.monotonic()
            if state is RunState.CANCELLING:
                self._stop(Ask.CANCEL)
            elif state not in ACTIVE:
                self._stop(Ask.TAKEN_AWAY)

    def _still_ours(self) -> bool:
        run = runs.get(self.claim.run_id)
        return run.state in ACTIVE and run.attempt == self.claim.attempt

    def _stop(self, ask: Ask) -> None:
        """TERM to the group once; KILL after the grace, at once when the run was taken away."""
        if self.ask is not None:
            return
        assert self._child
        self.ask = ask
        grace = 0.0 if ask is Ask.TAKEN_AWAY else settings().stop_grace_seconds
        self._kill_at = time.monotonic() + grace
        self._note(f"asked to stop: {ask.value}")
        signal_group(self._child.pid, self._started, signal.SIGTERM)

    def _note(self, text: str) -> None:
        logger.info("run %s: %s", self.claim.run_id, text)
        if self._log:
            self._log.note(text)

    def _insist(self, action: Callable[[], bool]) -> bool:
        """Try until the store answers; a worker that ends leaves the rest to the next reaper."""
        tries = 0
        while True:
            try:
                return action()
            except NotFound:
                return False
            except Unavailable as error:
                tries += 1
                if tries > _LAST_TRIES and self._stopping():
                    raise
                logger.warning("run %s waits for the store: %s", self.claim.run_id, error)
                time.sleep(_RETRY_S)


def _write(claim: Claim, conclusion: Conclusion) -> bool:
    run_id, attempt, why = claim.run_id, claim.attempt, conclusion.why
    if conclusion.result is not None:
        claims.set_result(run_id, conclusion.result, attempt=attempt)
    if conclusion.again is Again.FREE and recovery.hand_back(run_id, why, attempt=attempt):
        return True
    if conclusion.again is None:
        return claims.finish(run_id, conclusion.state, conclusion.error, attempt=attempt)
    # also where the run could not be handed back because somebody cancelled it just now
    return claims.lose(run_id, why, attempt=attempt) is RunState.QUEUED


def _told(conclusion: Conclusion) -> str:
    if conclusion.again:
        return "queued again"
    said = f": {conclusion.error['message']}" if conclusion.error else ""
    return f"{conclusion.state.value}{said}"
