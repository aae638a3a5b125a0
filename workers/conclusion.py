"""What a job's end means for its run: decided from facts alone, written by the supervisor."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum
from typing import Any

from app.settings import settings
from app.store.models import RunState
from app.store.transitions import RESUMABLE
from speculators_core.errors import SpeclabError, Stopped, Unavailable
from speculators_core.params import JobKind
from workers.outcome import DONE, FAILED, Outcome


class Ask(Enum):
    """Why a job was asked to stop."""

    CANCEL = "it was cancelled"
    WORKER_ENDS = "its worker was asked to end"
    TAKEN_AWAY = "the run is not this worker's any more"
    ISOLATED = "its worker could not reach the store"


class Again(Enum):
    """How a run that is to be queued again is put back."""

    COUNTED = "one of its attempts is used up"
    FREE = "the attempt does not count"


@dataclass(frozen=True, slots=True)
class Conclusion:
    """The state that ends the run, or (`again`) that it is queued again because of `why`."""

    state: RunState
    error: dict[str, Any] | None = None
    result: dict[str, Any] | None = None
    again: Again | None = None
    why: str = ""


def conclude(
    kind: JobKind,
    attempt: int,
    status: int,
    ask: Ask | None,
    left: Outcome,
    last_line: str | None,
) -> Conclusion:
    """`status`: of the job's process, negative the signal that killed it; `left`: what it wrote."""
    if status == DONE and not (kind is JobKind.DEPLOY and ask):
        return Conclusion(RunState.SUCCEEDED, result=left.result or {})
    if ask is Ask.CANCEL:
        return Conclusion(RunState.CANCELLED)
    if ask is not None:
        return _interrupted_by_us(kind, ask)
    if status == FAILED:
        return Conclusion(RunState.FAILED, left.error or _unexplained(status, last_line))
    return _interrupted(kind, attempt, status, last_line)


def ending(status: int) -> str:
    """How a process ended, in words."""
    if status >= 0:
        return f"it ended with status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    guess = " (out of memory?)" if -status == signal.SIGKILL else ""
    return f"it was killed by {name}{guess}"


def _interrupted_by_us(kind: JobKind, ask: Ask) -> Conclusion:
    why = ask.value
    if kind in RESUMABLE:
        return Conclusion(RunState.LOST, again=Again.FREE, why=why)
    error = Stopped(f"it stopped because {why}", hint="start it again when a worker is up")
    return Conclusion(RunState.CANCELLED, error.as_dict())


def _interrupted(kind: JobKind, attempt: int, status: int, last_line: str | None) -> Conclusion:
    """Killed by a stranger: kinds that can resume are tried again, a few times."""
    most = settings().max_attempts
    if kind in RESUMABLE and attempt < most:
        return Conclusion(RunState.LOST, again=Again.COUNTED, why=ending(status))
    tried = f", on attempt {attempt} of {most}" if kind in RESUMABLE else ""
    return Conclusion(RunState.FAILED, _unexplained(status, last_line, tried))


def _unexplained(status: int, last_line: str | None, tried: str = "") -> dict[str, str | None]:
    said = f"; its last words: {last_line}" if last_line else ""
    error: SpeclabError = Unavailable(
        f"the job process left no result: {ending(status)}{tried}{said}",
        hint="the run's log has more; with too little memory, choose smaller batches",
    )
    return error.as_dict()
