"""`speclab serve`: a foreground server, by `python -m workers.serve`. Takes no lease and no row."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from app.commands.core import Flags, path_of, resolved
from app.commands.flags import parse, with_flags
from app.commands.output import Json, emit
from app.settings import settings
from app.supervisor import die_with
from speculators_core.errors import Conflict, SpeclabError, Unavailable, revive
from speculators_core.params import DeployParams


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("serve")(
        with_flags(_serve, DeployParams, positional="speculator", optional_positional=True)
    )


Allow = Annotated[
    bool, typer.Option("--allow", help="serve it whatever its conversion found in its way")
]


def _serve(flags: Flags, allow: Allow = False, as_json: Json = False) -> None:
    """Serve a verifier with a speculator until Ctrl-C; without one, with the n-gram drafter."""
    params = parse(DeployParams, {**_from_config(flags), **flags})
    if params.speculator and not allow:
        _require_servable(path_of(params.speculator, "speculator"))
    process = subprocess.Popen(
        [sys.executable, "-m", "workers.serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=die_with(os.getpid()),
    )
    assert process.stdin and process.stdout
    with _ending(process):
        with suppress(BrokenPipeError), process.stdin as stdin:  # its status will tell
            stdin.write(json.dumps(resolved(params)).encode())
        for line in process.stdout:
            _announce(line, as_json)
        status = process.wait()
    if status != 0:
        raise Unavailable(f"the server ended with status {status}", hint="the lines above say why")


def _require_servable(speculator: str) -> None:
    """As strict as a deployment; who knows better says so with `--allow`."""
    from app.services import speculators

    try:
        speculators.require_servable(speculator)
    except Conflict as error:
        hint = "convert it again with a choice that settles this, or serve it all the same: --allow"
        raise Conflict(error.message, hint=hint) from None


def _from_config(flags: Flags) -> Flags:
    """A speculator names its verifier, so that `serve SPECULATOR` alone is enough."""
    speculator = flags.get("speculator")
    if "verifier" in flags or not isinstance(speculator, str):
        return {}
    from speculators_core.models.draft_config import read_draft_config, verifier_of

    named = verifier_of(read_draft_config(Path(path_of(speculator, "speculator"))))
    return {"verifier": named} if named else {}


def _announce(line: bytes, as_json: bool) -> None:
    try:
        told = json.loads(line)
    except json.JSONDecodeError as error:
        raise SpeclabError("the server process said something unexpected") from error
    if "error" in told:
        raise revive(told["error"])
    endpoint, name = told["endpoint"], told["served_name"]
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}]})
    emit(
        told,
        as_json,
        [
            *(f"Note: {note}" for note in told["notes"]),
            f"{name} answers at {endpoint}/v1",
            f"curl {endpoint}/v1/chat/completions -H 'content-type: application/json' -d '{body}'",
        ],
    )


@contextmanager
def _ending(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ctrl-C and TERM stop the server; so does any error here."""

    def stop(number: int, frame: FrameType | None) -> None:
        process.terminate()

    before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(settings().stop_grace_seconds + 10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
