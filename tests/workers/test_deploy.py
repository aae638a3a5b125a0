"""The deploy job: rows of the deployment as its server lives and dies; one real run at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import migrations
from app.services import acceptance, claims, deployments, runs, verifiers
from app.services.views import DeploymentView, RunView
from app.settings import settings
from app.store import engine
from app.store.models import DeploymentPhase, RunState, TraceMode
from speculators_core.errors import Stopped, Unavailable
from speculators_core.params import DeployParams
from tests import tiny
from tests.serving import ServingLab
from tests.workers.test_server import stand_in
from workers.jobs import deploy
from workers.metrics import Counters
from workers.processes import group_alive
from workers.server import Server

HOST = "deploy-test"


class Reporter:
    """Hears what the job says; asks it to stop when `until` holds."""

    def __init__(self, until: Callable[[], bool]) -> None:
        self.until = until
        self.texts: list[str] = []
        self.notes: list[str] = []

    def update(self, _: float | None, text: str, eta_s: float | None = None) -> None:
        self.texts.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def insist(self, action: Callable[[], Any]) -> Any:
        return action()

    def stopping(self) -> bool:
        return self.until()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunView]:
    """A claimed deployment in an empty store."""
    monkeypatch.setenv("SPECLAB_HOME", str(tmp_path / "home"))
    settings.cache_clear()
    migrations.upgrade(settings().store_url)
    claims.register_slots(HOST, [], job_slots=1, serving_slots=1)
    tiny.byte_tokenizer().save_pretrained(tmp_path / "verifier")
    submitted = runs.submit("deploy", {"verifier": str(tmp_path / "verifier")}, owner="ada")
    claims.claim(HOST)
    yield submitted
    engine.dispose()
    settings.cache_clear()


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[Server]:
    """The servers that were started."""
    made: list[Server] = []

    class Remembered(Server):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(deploy, "Server", Remembered)
    return made


def deploy_stand_in(
    run: RunView, mode: str, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploy, "plan", lambda params, socket: stand_in(mode))
    deploy.run(run, DeployParams(**run.params), reporter)  # type: ignore[arg-type]


def test_a_deployment_serves_until_it_is_stopped(run, servers, monkeypatch) -> None:
    known = SimpleNamespace(name="known", path=run.params["verifier"])
    monkeypatch.setattr(verifiers, "list_verifiers", lambda: [known])
    seen: list[DeploymentView] = []

    def ready() -> bool:
        seen.append(deployments.get(run.id))
        return seen[-1].ready

    with pytest.raises(Stopped):
        deploy_stand_in(run, "good", Reporter(ready), monkeypatch)
    at_ready = seen[-1]
    assert at_ready.endpoint == servers[0].launch.endpoint
    assert (at_ready.served_name, at_ready.verifier) == ("mine", "known")
    assert (at_ready.server_pgid, at_ready.server_started) == (
        servers[0].pgid,
        servers[0].started,
    )
    assert at_ready.ready_at is not None
    assert at_ready.command is not None and "stand_in_server" in at_ready.command[2]
    phases = list(dict.fromkeys(view.phase for view in seen if view.phase))
    assert set(phases) <= set(DeploymentPhase) and phases[-1] is DeploymentPhase.READY
    after = deployments.get(run.id)
    assert (after.phase, after.endpoint) == (DeploymentPhase.STOPPING, None)
    assert after.server_pgid is None
    assert not group_alive(servers[0].pgid, servers[0].started)


def test_a_server_that_dies_fails_the_run_with_its_own_words(run, servers, monkeypatch) -> None:
    with pytest.raises(Unavailable, match="ValueError: the weights are wrong"):
        deploy_stand_in(run, "dies", Reporter(lambda: False), monkeypatch)
    assert deployments.get(run.id).server_pgid is None


def test_a_server_that_is_killed_while_it_serves_fails_the_run(run, servers, monkeypatch) -> None:
    def kill_when_ready() -> bool:
        if deployments.get(run.id).ready and servers[0].running:
            servers[0]._process.kill()
            servers[0]._process.wait()
        return False

    with pytest.raises(Unavailable, match="exit status -9"):
        deploy_stand_in(run, "good", Reporter(kill_when_ready), monkeypatch)
    after = deployments.get(run.id)
    assert (after.endpoint, after.server_pgid) == (None, None)


def test_asked_to_stop_while_starting_nothing_is_left(run, servers, monkeypatch) -> None:
    with pytest.raises(Stopped):
        deploy_stand_in(run, "sick", Reporter(lambda: True), monkeypatch)
    assert not group_alive(servers[0].pgid, servers[0].started)


def test_what_can_not_be_launched_starts_nothing(run, servers) -> None:
    before = threading.active_count()
    with pytest.raises(Exception, match=r"config\.json is missing"):
        deploy.run(run, DeployParams(**run.params), Reporter(lambda: False))  # type: ignore[arg-type]
    assert servers == []
    assert threading.active_count() == before


def test_health_is_one_line() -> None:
    idle = Counters(running=0, waiting=0)
    assert deploy.health_line(idle) == "serving: 0 running, 0 waiting; nothing drafted yet"
    broken = Counters(steps=300, drafted=900)
    assert "none of 900 drafted tokens was accepted" in deploy.health_line(broken)
    busy = Counters(steps=10, drafted=30, accepted=7, running=2, waiting=1)
    assert "acceptance length 1.70 over 10 steps" in deploy.health_line(busy)


@pytest.mark.vllm
def test_a_real_deployment_tells_all_about_itself(
    vllm: DeploymentView, serving_lab: ServingLab
) -> None:
    assert vllm.trace_mode is TraceMode.IDS
    assert vllm.state is RunState.RUNNING
    assert any("repaired" in note for note in vllm.notes)
    assert "sampling repaired" in serving_lab.log(vllm.id)
    assert "speclab scheduler: synchronous, trace to" in serving_lab.log(vllm.id)
    assert group_alive(vllm.server_pgid, vllm.server_started)
    assert all(sample >= 0 for sample in acceptance.totals(vllm.id).per_position)
