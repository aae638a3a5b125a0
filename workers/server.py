"""One server process group of ours: start it, wait until it answers, watch it, end it.

vLLM's exit codes say nothing (0 after a crash), so what counts is whether we asked it to stop and
what its output says. Its health route can be answered by a stranger on the same port, so ready
means: our child lives, /health answers, /v1/models shows the name that only we gave, and one
short completion came back.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import httpx

from app.settings import settings
from app.store.models import DeploymentPhase
from speculators_core.errors import Stopped, Unavailable
from speculators_core.lifeline import die_with_parent
from workers.failure import first_cause
from workers.launch import Launch
from workers.log import lines_of
from workers.processes import end_group, group_alive, start_time

WARM_UP_ID = "speclab-warm-up"
START_LIMIT_S = 600.0  # a cold compile cache and slow disks included
_TAIL_LINES = 4000
_POLL_S = 0.25
_LOADING_SIGNS = ("Starting to load model", "Loading weights", "Loading safetensors")
_SHARED_MEMORY = "/dev/shm/"


class Server:
    """A started server. Make it from the main thread: it dies with the thread that made it."""

    def __init__(self, launch: Launch, output: IO[bytes]) -> None:
        self.launch = launch
        settings().home.mkdir(parents=True, exist_ok=True)
        parent = os.getpid()
        self._process = subprocess.Popen(
            launch.command,
            env=dict(launch.environment),
            cwd=settings().home,  # the project's root may hold stale metadata that hides our plugin
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent),
        )
        self.pgid = self._process.pid
        self.started = start_time(self.pgid) or 0.0
        self.loading = False
        self._ready = False
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._pump = threading.Thread(target=self._copy, args=(output,), daemon=True)
        self._pump.start()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def wait_ready(
        self,
        on_phase: Callable[[DeploymentPhase], None],
        stopping: Callable[[], bool],
        limit_s: float = START_LIMIT_S,
        *,
        warm_up: bool = True,
    ) -> list[str]:
        """Block until it answers; tells phases as they begin. Returns notes for a person.
        Without `warm_up` it need not chat: its health and its name are enough.

        Raises `Stopped` when asked to stop, `Unavailable` when it died, stays silent too long or
        answers nonsense; the caller then calls `stop`.
        """
        phase = DeploymentPhase.STARTING
        until = time.monotonic() + limit_s
        on_phase(phase)
        while not self._answers():
            self._check(stopping, until, limit_s)
            if self.loading and phase is DeploymentPhase.STARTING:
                phase = DeploymentPhase.LOADING
                on_phase(phase)
            time.sleep(_POLL_S)
        notes: list[str] = []
        if warm_up:
            on_phase(DeploymentPhase.WARMING)
            notes = self._warm_up(until - time.monotonic())
        self._ready = True
        on_phase(DeploymentPhase.READY)
        return notes

    def failure(self) -> Unavailable:
        """Why it died, by its own words."""
        self._pump.join(timeout=5.0)
        return Unavailable(
            f"the {self.launch.engine} server ended: {first_cause(self._tail)}",
            where=f"exit status {self._process.poll()}",
            hint="the run's log has all it said",
        )

    def stop(self, drain_s: float) -> bool:
        """TERM, wait, KILL the group, remove its shared memory. True when nothing is left.

        A server that never got ready has no answers to drain, and vLLM ignores TERM then.
        """
        segments = _shared_memory(self.pgid)
        if self.running:
            # first the server alone: it ends its own children in order
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=drain_s if self._ready else 0.5)
        gone = end_group(self.pgid, self.started, 0.0)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        for segment in segments if gone else ():
            segment.unlink(missing_ok=True)
        self._pump.join(timeout=5.0)
        return gone and not group_alive(self.pgid, self.started)

    def _copy(self, output: IO[bytes]) -> None:
        assert self._process.stdout is not None
        for line in lines_of(self._process.stdout):
            with suppress(OSError, ValueError):
                output.write(line)
                output.flush()
            text = line.decode(errors="replace").rstrip()
            self._tail.append(text)
            self.loading = self.loading or any(sign in text for sign in _LOADING_SIGNS)

    def _check(self, stopping: Callable[[], bool], until: float, limit_s: float) -> None:
        if stopping():
            raise Stopped("asked to stop while the server was starting")
        if not self.running:
            raise self.failure()
        if time.monotonic() > until:
            raise Unavailable(
                f"the {self.launch.engine} server does not answer after {limit_s:.0f} s",
                where=self.launch.endpoint,
                hint=f"last words: {self._tail[-1] if self._tail else 'none'}",
            )

    def _answers(self) -> bool:
        """Healthy, and it is ours."""
        try:
            if httpx.get(f"{self.launch.endpoint}/health", timeout=2.0).status_code != 200:
                return False
            models = httpx.get(f"{self.launch.endpoint}/v1/models", timeout=5.0).json()["data"]
        except (httpx.HTTPError, KeyError, ValueError):
            return False
        return any(model.get("id") == self.launch.served_name for model in models)

    def _warm_up(self, timeout_s: float) -> list[str]:
        """One short answer: a draft that can't run kills vLLM on its first request only."""
        body = {
            "model": self.launch.served_name,
            "messages": [{"role": "user", "content": "one two three one two three one two"}],
            "max_tokens": 16,
            "temperature": 0.0,
        }
        try:
            reply = httpx.post(
                f"{self.launch.endpoint}/v1/chat/completions",
                json=body,
                headers={"X-Request-Id": f"{WARM_UP_ID}-{os.getpid()}"},
                timeout=max(timeout_s, 30.0),
            )
        except httpx.HTTPError as error:
            self._settle()
            if not self.running:
                raise self.failure() from error
            raise Unavailable(
                f"the server did not finish its first answer: {error}",
                where=self.launch.endpoint,
            ) from error
        if reply.status_code != 200:
            if reply.status_code >= 500:
                self._settle()
            raise self.failure() if not self.running else _refused(reply)
        return self._drafted(reply.json())

    def _settle(self) -> None:
        """A dying engine takes its server along within seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=8.0)

    def _drafted(self, reply: dict[str, Any]) -> list[str]:
        counted = (reply.get("metrics") or {}).get("speculative_decoding") or {}
        if counted.get("num_spec_steps") or not self.launch.drafts_always:
            return []
        return ["the warm-up answer counted no drafted tokens: speculation may be inactive"]


def _refused(reply: httpx.Response) -> Unavailable:
    return Unavailable(
        f"the server refused its first request: {reply.status_code} {reply.text[:300]}",
        where=str(reply.request.url),
    )


def _shared_memory(pgid: int) -> list[Path]:
    """Segments that processes of the group have mapped, or that bear their pids."""
    found: set[Path] = set()
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        try:
            if os.getpgid(int(directory.name)) != pgid:
                continue
            lines = (directory / "maps").read_text(errors="replace").splitlines()
        except OSError:
            continue
        names = (line[line.index(_SHARED_MEMORY) :] for line in lines if _SHARED_MEMORY in line)
        found.update(Path(name) for name in names if not name.endswith("(deleted)"))
        found.update(Path(_SHARED_MEMORY).glob(f"__KMP_REGISTERED_LIB_{directory.name}_*"))
    return sorted(found)
