"""`speclab train`: from flags or a file, or an interrupted training taken up again.

While a training runs, `.OUTPUT.training.json` beside its output remembers what was asked for, so
that `--resume OUTPUT.checkpoints` needs no other flag. The directory of a run does as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from app.commands.core import Flags, new_place, resolved, run
from app.commands.core_process import ProgressBar, run_core
from app.commands.flags import Config, parse, read_config, with_flags
from app.commands.output import Json, Misuse, emit
from speculators_core.errors import DataError, NotFound
from speculators_core.params import TrainParams

_CHECKPOINTS = ".checkpoints"


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("train")(with_flags(_train, TrainParams))


def _train(
    flags: Flags,
    config: Config = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="OUTPUT.checkpoints of an interrupted training, or a run."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Where the speculator goes; must not exist."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train an EAGLE-3 speculator. Ctrl-C saves a checkpoint; --resume goes on from it."""
    if resume is None:
        values = {**read_config(config, TrainParams), **flags}
        request: dict[str, Any] = {"params": resolved(parse(TrainParams, values))}
    elif flags or config:
        raise Misuse(
            "a training is resumed with the parameters that it began with",
            where="--resume",
            hint="leave the other flags out",
        )
    else:
        request = _interrupted(resume.expanduser().absolute())
    target = output or request.get("output")
    if target is None:
        raise Misuse("--output is missing", where="--output", hint="name a new directory")
    request["output"] = str(new_place(Path(target)))
    with _remembered(request):
        if request["params"].get("hidden_states") == "vllm":
            _make_states(request)
        emit(run("train", request), as_json)


def _make_states(request: dict[str, Any]) -> None:
    """Starting vLLM is the workers' affair, which a process of its own is asked to do."""
    with ProgressBar("hidden-states") as bar:
        run_core("train", dict(request), bar, "workers.states")


def _interrupted(directory: Path) -> dict[str, Any]:
    """What an interrupted training was asked for, and where its checkpoints are."""
    noted = _note(directory.with_name(directory.name.removesuffix(_CHECKPOINTS)))
    of_run = directory / "params.json"
    if directory.is_dir() and noted.exists():
        return {**_read(noted), "resume": str(directory)}
    if of_run.exists():
        return {"params": _read(of_run), "resume": str(directory / "artifacts")}
    raise NotFound(
        "no interrupted training is there",
        where=str(directory),
        hint="give OUTPUT.checkpoints, which an interrupted `speclab train` left, or a directory "
        "of SPECLAB_HOME/runs",
    )


@contextmanager
def _remembered(request: dict[str, Any]) -> Iterator[None]:
    """Keep the request for as long as there is something to resume."""
    output = Path(request["output"])
    note = _note(output)
    note.parent.mkdir(parents=True, exist_ok=True)
    kept = {name: request[name] for name in ("params", "output")}
    note.write_text(json.dumps(kept))
    try:
        yield
    finally:
        if output.exists() or not output.with_name(f"{output.name}{_CHECKPOINTS}").exists():
            note.unlink(missing_ok=True)


def _note(output: Path) -> Path:
    return output.with_name(f".{output.name}.training.json")


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise DataError(f"not JSON: {error}", where=str(file)) from error
    return dict(found)
