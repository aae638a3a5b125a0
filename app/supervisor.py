"""The small parent of `speclab up` and `speclab worker`: starts children, restarts what dies,
ends all of it and leaves no process.

Children are session leaders, so that Ctrl-C reaches the parent alone and it can stop them in
order. The kernel signals them when the parent dies (PR_SET_PDEATHSIG), and hands their orphans to
the parent (PR_SET_CHILD_SUBREAPER), which ends whatever is left at the very end. One thread:
signals are waited for, never handled asynchronously.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from app.instance import kill_all
from speculators_core.errors import Stopped, Unavailable

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
_WAITED_FOR = _STOP_SIGNALS | {signal.SIGCHLD}
_LONGEST_DELAY_S = 30.0
_STABLE_AFTER_S = 60.0
_TICK_S = 0.25
_STARTS_BEFORE_GIVING_UP = 3
_LOGS_KEPT = 3
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class Child:
    """One process that must run. `grace_s`: between TERM and KILL."""

    name: str
    command: Sequence[str]
    log: Path
    grace_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: Path | None = None
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    due_at: float = 0.0
    failures: int = 0

    def start(self) -> None:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                cwd=self.directory,
                start_new_session=True,
                preexec_fn=die_with(os.getpid()),
            )
        self.started_at = time.monotonic()
        logger.info("started", extra={"child": self.name, "pid": self.process.pid})

    def ended(self) -> bool:
        """Whether it ended since it was started; notes when it is due again."""
        if self.process is None or self.process.poll() is None:
            return False
        now = time.monotonic()
        self.failures = 1 if now - self.started_at > _STABLE_AFTER_S else self.failures + 1
        self.due_at = now + min(_LONGEST_DELAY_S, 0.25 * 2 ** (self.failures - 1))
        logger.warning(
            "ended by itself", extra={"child": self.name, "status": self.process.returncode}
        )
        self.process = None
        return True

    def last_words(self, lines: int = 5) -> str:
        """The end of its log."""
        with suppress(FileNotFoundError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""


class Supervisor:
    """Runs children until it is told to stop; use as a context, which ends all of them."""

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._stop_asked = False

    def __enter__(self) -> Supervisor:
        signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        return self

    def __exit__(self, *_: object) -> None:
        for child in reversed(self._children):
            self._end(child)
        leftovers = psutil.Process().children(recursive=True)
        kill_all(leftovers)
        _reap_orphans(frozenset())
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)
        while signal.sigtimedwait(_WAITED_FOR, 0):  # a second Ctrl-C: we are done already
            pass
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAITED_FOR)

    def add(self, child: Child) -> Child:
        """Start a child and keep it running from now on; the last added is stopped first."""
        child.log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        rotate(child.log)
        child.start()
        self._children.append(child)
        return child

    def wait_until(self, ready: Callable[[], bool], of: Child, limit_s: float) -> None:
        """Until `ready()`; `Unavailable` with its last words where the child keeps ending."""
        deadline = time.monotonic() + limit_s
        while not ready():
            if of.failures >= _STARTS_BEFORE_GIVING_UP or time.monotonic() > deadline:
                raise Unavailable(
                    f"{of.name} does not start: {of.last_words() or 'it said nothing'}",
                    where=str(of.log),
                    hint="the log has the details",
                )
            self._tick()
            if self._stop_asked:
                raise Stopped("stopped while starting")

    def watch(self) -> None:
        """Restart what dies, until a signal asks to stop."""
        while not self._stop_asked:
            self._tick()

    def _tick(self) -> None:
        found = signal.sigtimedwait(_WAITED_FOR, _TICK_S)
        if found and found.si_signo in _STOP_SIGNALS:
            self._stop_asked = True
            return
        for child in self._children:
            child.ended()
            if child.process is None and time.monotonic() >= child.due_at:
                child.start()
        _reap_orphans(frozenset(c.process.pid for c in self._children if c.process))

    def _end(self, child: Child) -> None:
        process = child.process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(child.grace_s)
        except subprocess.TimeoutExpired:
            logger.warning("killed after its grace", extra={"child": child.name})
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        logger.info("stopped", extra={"child": child.name, "status": process.returncode})


def rotate(log: Path) -> None:
    """Begin a new log; `NAME.1` is the previous one, and so on up to `NAME.3`."""
    for number in range(_LOGS_KEPT, 0, -1):
        older = log.with_name(f"{log.name}.{number}")
        newer = log.with_name(f"{log.name}.{number - 1}") if number > 1 else log
        if newer.exists():
            newer.replace(older)


def die_with(parent: int) -> Callable[[], None]:
    """Runs in the child before exec: unblock signals, be told when the parent dies."""

    def before_exec() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAITED_FOR)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before we could ask
            os._exit(1)

    return before_exec


def _reap_orphans(own: frozenset[int]) -> None:
    """Collect ended orphans that became ours; our own children are left to `Popen`."""
    peek = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with suppress(ChildProcessError):
        while (found := os.waitid(os.P_ALL, 0, peek)) and found.si_pid not in own:
            os.waitpid(found.si_pid, 0)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
