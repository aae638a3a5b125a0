"""Foreground commands of the core: `convert`, `stitch-mtp`, `prepare`, `self-write`, `regenerate`,
`evaluate`.

They work on files: no row, no lease. Where there is a local store, registered names and
`run:<id>` stand for their paths.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from app.commands.conversion import converted_lines
from app.commands.core_process import ProgressBar, run_core
from app.commands.flags import parse, with_flags
from app.commands.output import Json, emit
from app.settings import settings
from speculators_core.errors import Conflict, InputError
from speculators_core.params import (
    ConvertParams,
    EvaluateParams,
    Params,
    PrepareParams,
    RegenerateParams,
    SelfWriteParams,
    StitchParams,
)
from speculators_core.untrusted import is_here

Flags = dict[str, Any]
_REFERENCES = frozenset({"verifier", "speculator", "data", "checkpoint", "start_from", "held_out"})

Output = Annotated[
    Path, typer.Option("--output", metavar="PATH", help="Where the result goes; must not exist.")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("convert")(with_flags(_convert, ConvertParams, positional="checkpoint"))
    app.command("stitch-mtp")(with_flags(_stitch_mtp, StitchParams, positional="speculator"))
    app.command("prepare")(with_flags(_prepare, PrepareParams, positional="data"))
    app.command("self-write")(with_flags(_self_write, SelfWriteParams))
    app.command("regenerate")(with_flags(_regenerate, RegenerateParams, positional="data"))
    app.command("evaluate")(with_flags(_evaluate, EvaluateParams, positional="speculator"))


def _convert(flags: Flags, output: Output, as_json: Json = False) -> None:
    """Convert someone's draft to the files that vLLM serves, and validate it."""
    made = _produce("convert", parse(ConvertParams, flags), output)
    emit(made, as_json, converted_lines(made))


def _stitch_mtp(flags: Flags, output: Output, as_json: Json = False) -> None:
    """Put an MTP head back into its verifier: the model that vLLM serves with method mtp."""
    emit(_produce("stitch_mtp", parse(StitchParams, flags), output), as_json)


def _prepare(flags: Flags, output: Output, as_json: Json = False) -> None:
    """Turn chats into tokens, loss masks and a vocabulary map."""
    emit(_produce("prepare", parse(PrepareParams, flags), output), as_json)


def _self_write(flags: Flags, output: Output, as_json: Json = False) -> None:
    """Let the verifier write its own training chats, questions included."""
    emit(_produce("self_write", parse(SelfWriteParams, flags), output), as_json)


def _regenerate(flags: Flags, output: Output, as_json: Json = False) -> None:
    """Let the verifier answer given chats anew; goes on where an earlier attempt ended."""
    emit(_produce("regenerate", parse(RegenerateParams, flags), output), as_json)


def _evaluate(flags: Flags, as_json: Json = False) -> None:
    """Measure acceptance length, acceptance by position, and speed."""
    emit(run("evaluate", {"params": resolved(parse(EvaluateParams, flags))}), as_json)


def resolved(params: Params) -> dict[str, Any]:
    """Parameter values with names and run references replaced by the paths they stand for."""
    values = params.model_dump(mode="json")
    for field in _REFERENCES & values.keys():
        value = values[field]
        if isinstance(value, str):
            values[field] = path_of(value, field)
        elif isinstance(value, list):
            values[field] = [path_of(item, field) for item in value]
    return values


def path_of(reference: str, field: str) -> str:
    """What a reference stands for; without a local store, a path or hub id as it is."""
    if settings().has_store:
        from app.services import references

        return references.resolve(reference, field)
    return str(Path(reference).expanduser().absolute()) if is_here(reference) else reference


def new_place(output: Path) -> Path:
    """The absolute path of an output that is not there yet. Raises `Conflict`, or `InputError`
    where it can't be a path.
    """
    try:
        str(output).encode()  # cards and reports are UTF-8
        target = output.expanduser().absolute()
    except (UnicodeEncodeError, RuntimeError) as error:  # RuntimeError: ~user of an unknown user
        raise InputError(
            f"{str(output)!r} can't be an output: {error}", hint="name another place, in UTF-8"
        ) from None
    if os.path.lexists(target):
        raise Conflict(
            "the output exists already", where=str(target), hint="name a new place, or move it away"
        )
    return target


def run(kind: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a core process, its progress drawn on stderr."""
    with ProgressBar(kind.replace("_", "-")) as bar:
        return run_core(kind, dict(request), bar)


def _produce(kind: str, params: Params, output: Path) -> dict[str, Any]:
    target = new_place(output)
    return run(kind, {"params": resolved(params), "output": str(target)})
