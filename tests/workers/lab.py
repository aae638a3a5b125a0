"""A whole lab in a short temporary directory: real store, real Valkey, real Celery workers.

Workers run `tests.workers.stand_in_app`, whose jobs are `tests.workers.stand_in_job`'s: what a
run does is spelled in its parameters, everything around it is the product.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app import embedded_broker
from app.services import runs
from app.services.views import RunView
from app.settings import settings
from app.store.models import RunState
from tests.conftest import ROOT

# A process that renames itself writes its title over its environment, by which tests find it.
KEEP_ENVIRONMENT = {"SPT_NOENV": "1"}
_WORKER = ("-Q", "runs", "--loglevel", "INFO")


class Lab:
    """One SPECLAB_HOME with a broker and any number of workers, all ended by `close`."""

    def __init__(self, home: Path, app: str = "tests.workers.stand_in_app") -> None:
        self.home = home
        self.app = app
        self.broker: subprocess.Popen[bytes] | None = None
        self.workers: list[subprocess.Popen[bytes]] = []

    def start_broker(self) -> None:
        folder = self.home / "broker"
        folder.mkdir(exist_ok=True)
        with (folder / "log").open("ab") as out:
            self.broker = subprocess.Popen(
                embedded_broker.command(settings()),
                stdout=out,
                stderr=out,
            )
        wait_for(lambda: embedded_broker.answers(settings()), 10, "the broker")

    def kill_broker(self) -> None:
        """As a crash would: no last save."""
        assert self.broker
        self.broker.kill()
        self.broker.wait()
        with contextlib.suppress(FileNotFoundError):
            (self.home / "broker" / "s").unlink()

    def start_worker(
        self, *options: str, ready: bool = True, **environment: str
    ) -> subprocess.Popen[bytes]:
        log = self.worker_log
        seen = log.read_text(errors="replace").count(" ready.") if log.exists() else 0
        with log.open("ab") as out:
            worker = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", self.app, "worker", *_WORKER, *options],
                cwd=ROOT,
                env={**os.environ, **KEEP_ENVIRONMENT, **environment},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.workers.append(worker)
        if ready:
            wait_for(
                lambda: log.read_text(errors="replace").count(" ready.") > seen,
                60,
                lambda: f"a worker that is ready:\n{log.read_text()[-3000:]}",
            )
        return worker

    @property
    def worker_log(self) -> Path:
        return self.home / "worker.log"

    def processes(self) -> list[int]:
        """Everything that runs with this lab's SPECLAB_HOME, but for the broker and this test."""
        mark = f"SPECLAB_HOME={self.home}\0".encode()
        mine = {os.getpid(), self.broker.pid if self.broker else 0}
        return [pid for pid in _all_processes() if pid not in mine and mark in _environment(pid)]

    def close(self) -> None:
        for worker in self.workers:
            if worker.poll() is None:
                worker.terminate()
        for worker in self.workers:
            try:
                worker.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()
        if self.broker and self.broker.poll() is None:
            self.broker.kill()
            self.broker.wait()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def submit(does: str, *, kind: str = "verifier", **options: Any) -> RunView:
    """A run whose stand-in job does `does` (see `stand_in_job`)."""
    place = settings().home / does  # a deployment's verifier has to be there
    params: dict[str, dict[str, Any]] = {
        "verifier": {"source": does, "name": "stand-in"},
        "deploy": {"verifier": str(place), "engine": "reference"},
    }
    if kind == "deploy":
        place.mkdir(exist_ok=True)
    return runs.submit(kind, params[kind], owner=options.pop("owner", "ada"), **options)


def wait_for(condition: Callable[[], Any], seconds: float, what: str | Callable[[], str]) -> Any:
    """The first true answer of `condition`."""
    until = time.monotonic() + seconds
    while True:
        if answer := condition():
            return answer
        if time.monotonic() > until:
            said = what if isinstance(what, str) else what()
            raise AssertionError(f"waited {seconds} s in vain for {said}")
        time.sleep(0.05)


def wait_for_state(run_id: str, *states: RunState, seconds: float = 60) -> RunView:
    def told() -> str:
        run = runs.get(run_id)
        return f"{states}: {run!r}\n{runs.log(run_id).text}\n{_tail(settings().home)}"

    wait_for(lambda: runs.get(run_id).state in states, seconds, told)
    return runs.get(run_id)


def _tail(home: Path) -> str:
    log = home / "worker.log"
    return log.read_text(errors="replace")[-4000:] if log.exists() else ""


def _all_processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
