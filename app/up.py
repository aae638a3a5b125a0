"""`speclab up`: everything on this machine, in one parent. `speclab worker`: the worker alone.

Order of starting: store migrated, broker, worker, app; of stopping, the reverse. The worker ends
its jobs, and they their servers.
"""

from __future__ import annotations

import json
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable

from sqlalchemy import make_url

import migrations
from app import embedded_broker, instance
from app.auth import Gate, private_text, require_loopback
from app.settings import Settings
from app.supervisor import Child, Supervisor
from speculators_core.errors import InputError, Unavailable

_BROKER_START_S = 60.0  # a long append-only file is read first
_APP_START_S = 300.0
_APP_GRACE_S = 10.0
_BROKER_GRACE_S = 10.0
_ENDING_APP_S = 15.0

Announce = Callable[[str], None]
"""Called once the app answers, with its one-time link."""


def up(current: Settings, announce: Announce) -> None:
    """Run until told to stop. Raises `Conflict` where it runs already."""
    require_loopback(current.host)
    require_free_port(current)
    _private_home(current)
    with instance.hold(current.home, "up"):
        try:
            with Supervisor() as supervisor:
                _start(current, supervisor)
                instance.publish(current.home, "up", address(current))
                gate = Gate.of(current)
                private_text(gate.api_token_file)  # scripts look for it there
                announce(gate.issue_link(address(current)))
                supervisor.watch()
        finally:
            embedded_broker.tidy(current)


def _start(current: Settings, supervisor: Supervisor) -> None:
    """Until the app answers."""
    _ready_store(current)
    if current.broker_url is None:
        embedded_broker.prepare(current)
        broker = supervisor.add(_broker(current))
        supervisor.wait_until(lambda: embedded_broker.answers(current), broker, _BROKER_START_S)
    supervisor.add(_worker(current))
    app = supervisor.add(_app(current))
    supervisor.wait_until(lambda: _healthy(current), app, _APP_START_S)


def worker(current: Settings, announce: Callable[[], None]) -> None:
    """Join this host to a lab, whose store and broker the settings name. Until told to stop."""
    for name, value in (("BROKER_URL", current.broker_url), ("DATABASE_URL", current.database_url)):
        if not value:
            raise InputError(
                f"a worker of a lab needs SPECLAB_{name}",
                where=f"SPECLAB_{name}",
                hint="on a single machine `speclab up` starts a worker of its own",
            )
    _private_home(current)
    with instance.hold(current.home, "worker"), Supervisor() as supervisor:
        supervisor.add(_worker(current))
        announce()
        supervisor.watch()


def address(current: Settings) -> str:
    """Where people's browsers find the app."""
    host = f"[{current.host}]" if ":" in current.host else current.host
    return f"http://{host}:{current.port}"


def stop_seconds(current: Settings) -> float:
    """Longest time an orderly stop takes."""
    return _APP_GRACE_S + _worker_grace(current) + _BROKER_GRACE_S + 5.0


def require_free_port(current: Settings) -> None:
    """`Unavailable` where something listens; an app whose parent was killed gets time to end."""
    crashed = (current.home / "up.json").exists()
    deadline = time.monotonic() + (_ENDING_APP_S if crashed else 0.0)
    while not _port_is_free(current.host, current.port):
        if time.monotonic() > deadline:
            raise Unavailable(
                f"port {current.port} of {current.host} is in use by another program",
                where=f"--port {current.port}",
                hint=f"choose another, such as --port {current.port + 1}; "
                f"`ss -ltnp 'sport = :{current.port}'` shows who listens",
            )
        time.sleep(0.1)


def _port_is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as uvicorn does
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _private_home(current: Settings) -> None:
    current.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    (current.home / "empty").mkdir(exist_ok=True)


def _ready_store(current: Settings) -> None:
    """SQLite is migrated here (its file is copied first); a lab's database by its operator."""
    if make_url(current.store_url).get_backend_name() == "sqlite":
        migrations.upgrade(current.store_url)
    elif migrations.pending(current.store_url):
        raise Unavailable(
            "the database is not at this Speclab's schema",
            where="SPECLAB_DATABASE_URL",
            hint="run `speclab db upgrade` once for the lab",
        )


def _healthy(current: Settings) -> bool:
    try:
        with urllib.request.urlopen(f"{address(current)}/healthz", timeout=10) as answer:
            return bool(json.load(answer)["ok"])
    except (OSError, ValueError, KeyError):
        return False


def _broker(current: Settings) -> Child:
    return Child(
        "broker",
        embedded_broker.command(current),
        current.home / "logs" / "broker.log",
        _BROKER_GRACE_S,
    )


def _worker(current: Settings) -> Child:
    return Child(
        "worker",
        [
            *(sys.executable, "-m", "celery", "-A", "workers.celery_app", "worker"),
            *("--queues", "runs", "--pool", "prefork", "--loglevel", "INFO"),
            *("--without-gossip", "--without-mingle"),
        ],
        current.home / "logs" / "worker.log",
        _worker_grace(current),
        _environment(current),
        current.home / "empty",
    )


def _app(current: Settings) -> Child:
    return Child(
        "app",
        [
            *(sys.executable, "-m", "uvicorn", "--factory", "app.main:create_app"),
            *("--host", current.host, "--port", str(current.port)),
            "--no-access-log",  # it would show one-time links
            "--no-proxy-headers",
            # Clients that poll every few seconds would meet uvicorn's 5 just as it hangs up.
            *("--timeout-keep-alive", "75"),
            *("--timeout-graceful-shutdown", "3"),  # pages hold streams open for ever
        ],
        current.home / "logs" / "app.log",
        _APP_GRACE_S,
        _environment(current),
        current.home / "empty",  # Gradio serves files below its working directory
    )


def _environment(current: Settings) -> dict[str, str]:
    """What children must see the same way as this process, flags included."""
    values = {"SPECLAB_HOME": str(current.home), "SPECLAB_HOST": current.host}
    values["SPECLAB_PORT"] = str(current.port)
    if current.gpus is not None:
        values["SPECLAB_GPUS"] = current.gpus
    return {**values, "PYTHONUNBUFFERED": "1"}


def _worker_grace(current: Settings) -> float:
    """Its jobs get their own grace first."""
    return current.stop_grace_seconds + 15.0
