"""Starting, watching and ending a server process, with small stand-ins of each kind of trouble."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.settings import settings
from app.store.models import DeploymentPhase, TraceMode
from speculators_core.errors import Stopped, Unavailable
from tests.conftest import ROOT
from workers.launch import HOST, Launch, choose_port
from workers.processes import group_alive
from workers.server import Server

P = DeploymentPhase


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SPECLAB_HOME", str(tmp_path / "home"))
    settings.cache_clear()
    yield tmp_path / "home"
    settings.cache_clear()


def stand_in(mode: str, port: int | None = None) -> Launch:
    port = port or choose_port(None)
    return Launch(
        engine="stand-in",
        command=(sys.executable, "-m", "tests.workers.stand_in_server", mode, str(port), "mine"),
        environment={**os.environ, "PYTHONPATH": str(ROOT)},
        port=port,
        served_name="mine",
        speculative_tokens=3,
        drafts_always=True,
        trace_mode=TraceMode.OFF,
        notes=(),
    )


@pytest.fixture
def start() -> Iterator[Callable[[str], Server]]:
    servers: list[Server] = []

    def make(mode: str, port: int | None = None) -> Server:
        servers.append(Server(stand_in(mode, port), io.BytesIO()))
        return servers[-1]

    yield make
    for server in servers:
        server.stop(0.0)


def never() -> bool:
    return False


def ignore(_: DeploymentPhase) -> None:
    pass


def test_a_server_goes_through_its_phases_and_leaves_nothing(start) -> None:
    server = start("good")
    phases: list[DeploymentPhase] = []
    assert server.wait_ready(phases.append, never, 20) == []
    assert phases == [P.STARTING, P.LOADING, P.WARMING, P.READY]
    assert server.running
    assert server.stop(5.0)
    assert not group_alive(server.pgid, server.started)


def test_what_it_says_is_passed_on(home: Path) -> None:
    output = io.BytesIO()
    server = Server(stand_in("good"), output)
    server.wait_ready(ignore, never, 20)
    server.stop(5.0)
    assert b"Loading weights" in output.getvalue()


def test_speculation_that_does_not_happen_is_noted(start) -> None:
    assert "no drafted tokens" in start("idle").wait_ready(ignore, never, 20)[0]


def test_one_that_dies_says_why(start) -> None:
    with pytest.raises(Unavailable, match="ended: ValueError: the weights are wrong"):
        start("dies").wait_ready(ignore, never, 20)


def test_one_that_dies_of_its_first_request_says_why(start) -> None:
    with pytest.raises(Unavailable, match="IndexError: index 300 is out of bounds"):
        start("dies_on_first").wait_ready(ignore, never, 20)


def test_one_that_refuses_its_first_request_is_told(start) -> None:
    with pytest.raises(Unavailable, match=r"400.*no chat template"):
        start("refuses").wait_ready(ignore, never, 20)


def test_one_that_never_gets_healthy_is_given_up(start) -> None:
    server = start("sick")
    with pytest.raises(Unavailable, match="does not answer after 2 s"):
        server.wait_ready(ignore, never, 2)
    assert server.stop(1.0)


def test_a_stranger_on_the_port_is_not_taken_for_ours(start) -> None:
    stranger = start("stranger")
    ours = start("good", port=stranger.launch.port)  # can't bind, dies
    with pytest.raises(Unavailable, match="Address already in use"):
        ours.wait_ready(ignore, never, 20)
    assert stranger.running


def test_asked_to_stop_while_starting_it_stops(start) -> None:
    server = start("sick")
    with pytest.raises(Stopped):
        server.wait_ready(ignore, lambda: True, 20)
    assert server.stop(2.0)


def test_one_that_ignores_term_is_killed_with_its_children(start) -> None:
    server = start("stubborn")
    server.wait_ready(ignore, never, 20)
    began = time.monotonic()
    assert server.stop(0.5)
    assert time.monotonic() - began < 5
    assert not group_alive(server.pgid, server.started)


def test_it_dies_with_whoever_started_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from tests.workers.test_server import stand_in; "
        "from workers.server import Server; "
        "server = Server(stand_in('good'), sys.stderr.buffer); "
        "print(server.pgid, server.started, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    assert parent.stdout is not None
    pgid, started = parent.stdout.readline().split()
    assert group_alive(int(pgid), float(started))
    parent.kill()
    parent.wait()
    until = time.monotonic() + 5
    while group_alive(int(pgid), float(started)):
        assert time.monotonic() < until, "the server outlived its parent"
        time.sleep(0.05)


def test_the_host_is_this_machine_only() -> None:
    assert stand_in("good").endpoint.startswith(f"http://{HOST}:")
    assert HOST == "127.0.0.1"
