"""A deployment under its own SPECLAB_HOME: real store, real Valkey, the real deploy job."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import migrations
from app.services import claims, deployments, runs
from app.services.views import DeploymentView
from app.settings import settings
from app.store import engine
from app.store.models import RunState
from tests.conftest import CACHE
from tests.workers.lab import Lab, wait_for
from workers.outcome import STOPPED

HOST = "serving-test"
READY_S = 480
END_S = 60


class ServingLab:
    """Starts deploy jobs as a worker would, and ends them."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="speclab-s-", dir="/tmp"))  # sockets need short
        cache = CACHE / "vllm"  # what vLLM learns of an architecture costs it half a minute
        cache.mkdir(parents=True, exist_ok=True)
        (self.home / "cache").mkdir()
        (self.home / "cache" / "vllm").symlink_to(cache)
        self.lab = Lab(self.home)
        self.jobs: dict[str, subprocess.Popen[bytes]] = {}
        with self.settings():
            migrations.upgrade(settings().store_url)
            claims.register_slots(HOST, [], job_slots=1, serving_slots=4)
            self.lab.start_broker()

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Within it, this process's settings, store and broker are this lab's."""
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("SPECLAB_")]:
                patch.delenv(name)
            patch.setenv("SPECLAB_HOME", str(self.home))
            settings.cache_clear()
            try:
                yield
            finally:
                engine.dispose()
        settings.cache_clear()

    def deploy(self, **params: Any) -> str:
        """Submit, claim and start a deployment; its id, at once."""
        with self.settings():
            run = runs.submit("deploy", params, owner="ada", name=f"test {params.get('engine')}")
            claim = claims.claim(HOST)
            assert claim is not None and claim.run_id == run.id
        log = self.home / f"{run.id}.log"
        with log.open("wb") as out:
            self.jobs[run.id] = subprocess.Popen(
                [sys.executable, "-m", "workers.job", run.id],
                stdout=out,
                stderr=out,
                env={**os.environ, "SPECLAB_HOME": str(self.home), "PYTHONUNBUFFERED": "1"},
            )
        return run.id

    def ready(self, run_id: str) -> DeploymentView:
        """Wait until it answers."""
        with self.settings():

            def ready_or_over() -> bool:
                over = self.jobs[run_id].poll() is not None
                assert not over, f"the deploy job ended:\n{self.log(run_id)[-4000:]}"
                return deployments.get(run_id).ready

            wait_for(ready_or_over, READY_S, lambda: f"ready:\n{self.log(run_id)[-4000:]}")
            return deployments.get(run_id)

    def log(self, run_id: str) -> str:
        return (self.home / f"{run_id}.log").read_text(errors="replace")

    def stop(self, run_id: str) -> int:
        """TERM, as the supervisor does; the job's exit status."""
        self.jobs[run_id].send_signal(signal.SIGTERM)
        return self.wait(run_id)

    def wait(self, run_id: str) -> int:
        status = self.jobs[run_id].wait(timeout=END_S)
        with self.settings():
            claims.finish(run_id, RunState.FAILED if status == 1 else RunState.CANCELLED)
        return status

    def close(self) -> None:
        """End everything. Asserts that each deployment left when it was asked to, and whole."""
        try:
            running = [run_id for run_id, job in self.jobs.items() if job.poll() is None]
            statuses = [self.stop(run_id) for run_id in running]
            left = self.lab.processes()
        finally:
            self.lab.close()
            shutil.rmtree(self.home, ignore_errors=True)
        assert statuses == [STOPPED] * len(running)
        assert left == []
