"""This machine: `up`, `down`, `status`, `worker`, `doctor`, `db upgrade`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from app import instance
from app.commands.output import Json, emit, say, table
from app.settings import Settings, settings
from speculators_core.errors import NotFound, Stopped

_ENTER = "Enter with this link, which works once: "


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("up")(_up)
    app.command("down")(_down)
    app.command("status")(_status)
    app.command("worker")(_worker)
    app.command("doctor")(_doctor)
    database = typer.Typer(no_args_is_help=True, help="Look after the store.")
    database.command("upgrade")(_upgrade)
    app.add_typer(database, name="db")


def _up(
    host: Annotated[str | None, typer.Option(help="Address to listen on (loopback).")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port to listen on.")] = None,
    as_json: Json = False,
) -> None:
    """Run everything on this machine until Ctrl-C: store, broker, worker, app."""
    from app.up import address, up

    chosen = {"host": host, "port": port}
    current = settings().model_copy(update={k: v for k, v in chosen.items() if v is not None})
    _quiet_events()

    def announce(link: str) -> None:
        lines = [
            f"Speclab is ready at {address(current)}",
            f"{_ENTER}{link}",
            "Ctrl-C, or `speclab down` elsewhere, stops all of it.",
        ]
        emit({"address": address(current), "link": link, "home": str(current.home)}, as_json, lines)

    running = instance.running(current.home, "up")
    if running and running.address:
        _announce_running(current, running.address, as_json)
        return
    say("starting; the first time takes a minute")
    try:
        up(current, announce)
    except Stopped:
        say("stopped while starting")
        return
    say("stopped")


def _announce_running(current: Settings, address: str, as_json: bool) -> None:
    from app.auth import Gate

    link = Gate.of(current).issue_link(address)
    lines = [
        f"Speclab runs already at {address}",
        f"{_ENTER}{link}",
    ]
    emit({"address": address, "link": link, "home": str(current.home)}, as_json, lines)


def _down(as_json: Json = False) -> None:
    """Stop what `speclab up` started here: app, worker with its jobs and servers, broker."""
    from app.up import stop_seconds

    current = settings()
    found = [i for role in instance.ROLES if (i := instance.running(current.home, role))]
    orderly = [instance.stop(one, stop_seconds(current)) for one in found]
    lines = ["nothing was running"] if not found else ["stopped"]
    if not all(orderly):
        lines = ["stopped; what did not end in time was killed"]
    emit({"stopped": bool(found), "orderly": all(orderly)}, as_json, lines)


def _status(
    link: Annotated[bool, typer.Option("--link", help="Print a new one-time link.")] = False,
    as_json: Json = False,
) -> None:
    """Whether Speclab runs here, and how it is."""
    current = settings()
    found = instance.running(current.home, "up")
    if link:
        _print_link(current, found, as_json)
        return
    document: dict[str, Any] = {
        "up": found is not None,
        "address": found.address if found else None,
        "home": str(current.home),
    }
    if not current.has_store:
        emit(document, as_json, [f"Speclab does not run here, and {current.home} holds no store"])
        return
    from app.services import health

    seen = health.check()
    document |= seen.model_dump(mode="json")
    emit(document, as_json, _status_lines(document, seen.complaint))


def _status_lines(document: dict[str, Any], complaint: str) -> Iterable[str]:
    if document["address"]:
        yield f"Speclab runs at {document['address']}"
    else:
        yield "Speclab is starting or stopping" if document["up"] else "Speclab does not run here"
    usable = document["store"]["ok"]
    if complaint and (document["up"] or not usable):
        yield complaint
    if not usable:
        return
    yield f"runs: {document['running']} running, {document['queued']} queued"
    for worker in document["workers"]:
        alive = "alive" if worker["alive"] else f"last seen {worker['seen_at']}"
        taken = f"{worker['taken']} of {worker['slots']} slots taken"
        yield f"worker {worker['host']}: {alive}, {taken}"


def _print_link(current: Settings, found: instance.Instance | None, as_json: bool) -> None:
    if found is None or found.address is None:
        raise NotFound(
            "Speclab does not run here", where=str(current.home), hint="start it: speclab up"
        )
    from app.auth import Gate

    address = Gate.of(current).issue_link(found.address)
    emit({"link": address}, as_json, [address])


def _worker(
    gpus: Annotated[str | None, typer.Option(help="GPU indices to offer, such as 0,1.")] = None,
    as_json: Json = False,
) -> None:
    """Join this host to a lab (SPECLAB_BROKER_URL, SPECLAB_DATABASE_URL) until Ctrl-C."""
    from app.up import worker

    current = settings().model_copy(update={"gpus": gpus} if gpus else {})
    _quiet_events()
    worker(current, lambda: emit({"home": str(current.home)}, as_json, ["the worker runs"]))
    say("stopped")


def _doctor(as_json: Json = False) -> None:
    """What this machine has, and how to get what is missing. Status 1 where something is."""
    from app.services import doctor

    findings = doctor.examine()
    marks = {"ok": "ok", "warning": "!", "missing": "MISSING"}
    rows = [
        (marks[f.state], f.name, f"{f.value}{' → ' + f.fix if f.fix else ''}") for f in findings
    ]
    document = {"findings": [finding.model_dump(mode="json") for finding in findings]}
    emit(document, as_json, table(("", "what", "found"), rows))
    if any(finding.state == "missing" for finding in findings):
        raise typer.Exit(1)


def _upgrade(as_json: Json = False) -> None:
    """Bring the store to the newest schema; a SQLite file is copied first."""
    import migrations

    current = settings()
    current.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    migrations.upgrade(current.store_url)
    emit({"revision": migrations.head()}, as_json, [f"the store is at {migrations.head()}"])


def _quiet_events() -> None:
    """The parent tells people in words; its events go to the same stderr, warnings only."""
    from app import event_log

    event_log.configure(logging.WARNING)
