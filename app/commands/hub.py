"""Giving speculators away and bringing models in: `export`, `launch`, `push`, `pull`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import typer

from app.commands.core import Flags, Output, new_place, path_of, resolved, run
from app.commands.flags import parse, with_flags
from app.commands.output import Json, emit
from speculators_core.params import ExportParams, LaunchParams, PullParams, PushParams

_ENGINES = {
    "vllm": "vLLM",
    "podman": "vLLM in the container of Red Hat AI Inference",
    "sglang": "SGLang",
}


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("export")(with_flags(_export, ExportParams, positional="speculator"))
    app.command("launch")(with_flags(_launch, LaunchParams, positional="speculator"))
    app.command("push")(with_flags(_push, PushParams, positional=("speculator", "repository")))
    app.command("pull")(with_flags(_pull, PullParams, positional="repository"))


def _export(flags: Flags, output: Output, as_json: Json = False) -> None:
    """Write a speculator in the layout of SpecForge and SGLang, or of the EAGLE authors."""
    params = parse(ExportParams, flags)
    request = {"params": resolved(params), "output": str(new_place(output))}
    found = run("export", request)
    emit(found, as_json, _exported(found))


def _launch(flags: Flags, as_json: Json = False) -> None:
    """Print the commands that serve a speculator: vLLM, podman, SGLang."""
    from speculators_core.launch import commands

    params = parse(LaunchParams, flags)
    place = path_of(params.speculator, "speculator")
    found = commands(params.model_copy(update={"speculator": place})).model_dump()
    emit(found, as_json, _lines(found))


def _push(flags: Flags, as_json: Json = False) -> None:
    """Upload a speculator to the hub, private unless --no-private. Needs HF_TOKEN."""
    emit(run("push", {"params": resolved(parse(PushParams, flags))}), as_json)


def _pull(flags: Flags, as_json: Json = False) -> None:
    """Download a repository of the hub into its cache; a download that broke goes on."""
    emit(run("pull", {"params": resolved(parse(PullParams, flags))}), as_json)


def _exported(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"output: {found['output']}"
    for loss in found["losses"]:
        yield f"not held: {loss['field']} {loss['value']} ({loss['meaning']})"
    yield from _lines(found["commands"])


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    for engine, title in _ENGINES.items():
        if found[engine] is not None:
            yield from ("", f"# {title}", found[engine])
    yield from ("", *(f"# note: {note}" for note in found["notes"]))
