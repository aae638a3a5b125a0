"""What a string in the parameters stands for: a run's output, a registered name, a path, a hub id.

The job process resolves references before the core sees them (`resolve_params`). Pages and REST
check first that a path is one that a person at a browser may name (`check_params`); the CLI, which
acts with its user's own rights, has no such limits.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import select

from app.services import runs
from app.services.fingerprint import split_reference
from app.settings import settings
from app.store.engine import reading
from app.store.models import DataSet, RunState, Speculator, VerifierModel
from speculators_core.errors import Conflict, Forbidden, InputError, NotFound, about
from speculators_core.hub.reference import is_hub_id, means_directory
from speculators_core.params import JobKind
from speculators_core.untrusted import check_links, is_here, links, within

_REGISTRIES: dict[str, type[VerifierModel] | type[Speculator] | type[DataSet]] = {
    "verifier": VerifierModel,
    "speculator": Speculator,
    "data": DataSet,
}
_REGISTRY_OF = {
    "verifier": "verifier",
    "speculator": "speculator",
    "checkpoint": "speculator",
    "start_from": "speculator",
    "data": "data",
    "held_out": "data",
}
"""For each parameter that names something: the registry that is asked first."""
_PATH_ONLY = frozenset({"source"})
_LONGEST_PATH = 4096
_PRIVATE = frozenset({"broker", "links", "logs"})


def resolve(reference: str, field: str | None = None) -> str:
    """The path (or the hub id, unchanged) that a reference stands for.

    `field` is the parameter it was given for: its registry is asked before the others. Raises
    `NotFound`, `Conflict` (the run has not succeeded yet) or `InputError` (no such form).
    """
    if not reference.strip():
        raise InputError("the reference is empty", hint="a name, a path, run:ID or a hub id")
    named = split_reference(reference)
    if named:
        return _output(*named)
    place = _place(reference)
    if not _looks_like_path(reference) and (path := _registered(reference, field)):
        return path
    if is_here(place):
        return str(place.resolve())
    if is_hub_id(reference) and not means_directory(reference):
        return reference
    raise _unknown(reference)


def resolve_params(kind: JobKind, params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a run with every reference replaced by what it stands for."""
    return _each_reference(params, resolve)


def check_params(kind: JobKind, params: Mapping[str, Any]) -> None:
    """`check_paths` and `check_names`."""
    check_paths(params)
    check_names(kind, params)


def check_paths(params: Mapping[str, Any]) -> None:
    """Raise unless every path among the parameters is one that a person may name in a page. Where
    the error names no file, its `where` is the parameter.
    """

    def check(reference: str, field: str) -> str:
        with about(field):
            if _names_path(reference):
                check_path(reference)
        return reference

    _each_reference(params, check)
    for field in _PATH_ONLY & set(params):
        if isinstance(params[field], str):
            check(params[field], field)


def check_names(kind: JobKind, params: Mapping[str, Any]) -> None:
    """Raise where a parameter names nothing, or something of another kind, so that a run would
    only fail over it. Outputs of runs are not looked at, they may not be there yet; and a run that
    waits for others is not to be checked, for they may make what it names. As for `where`, see
    `check_paths`.
    """

    def check(reference: str, field: str) -> str:
        with about(field):
            if not split_reference(reference):
                _refuse_another_kind(reference, field)
                resolve(reference, field)
        return reference

    _each_reference(params, check)
    if kind == JobKind.PREPARE:
        _check_vocabulary(params)


def _refuse_another_kind(name: str, field: str) -> None:
    """A verifier in place of a speculator, or the other way round."""
    if field == "checkpoint" or _looks_like_path(name):
        return
    with reading() as session:
        found = {
            word
            for word, other in _REGISTRIES.items()
            if session.scalar(select(other.id).where(other.name == name))
        }
    wanted = _REGISTRY_OF[field]
    if found and wanted not in found and not is_hub_id(name):
        words = {"data": "data set"}
        what = next(iter(found))
        raise InputError(
            f"{name!r} is a {words.get(what, what)}, and a {words.get(wanted, wanted)} is needed",
            hint="see the Models and Data pages for names",
        )


def _check_vocabulary(params: Mapping[str, Any]) -> None:
    size, name = params.get("draft_vocab_size"), params.get("verifier")
    with reading() as session:
        has = session.scalar(select(VerifierModel.vocab_size).where(VerifierModel.name == name))
    if has and isinstance(size, int) and size > has:
        raise InputError(
            f"a draft vocabulary of {size:,} tokens, but {name} has only {has:,}",
            where="draft_vocab_size",
            hint="a smaller one, or leave it empty for the whole vocabulary",
        )


def check_path(path: str | Path) -> Path:
    """The real path, if it lies, symlinks followed, in a root that pages may read.

    Roots: the user's home directory, SPECLAB_HOME, the hub cache and SPECLAB_ROOTS. Hidden files
    in a root and Speclab's own files (store, secrets, broker) are refused; so is a directory with
    a link out of the roots in it, whose target would be read in its place.

    Raises `Forbidden` or `NotFound`.
    """
    real = Path(os.path.realpath(_place(str(path))))
    if _private(real) or not any(within(real, root) for root in roots()):
        raise Forbidden(
            f"{str(path)!r} is not in a directory that pages may read",
            hint="allowed: " + ", ".join(str(root) for root in roots()),
        )
    if not real.exists():
        raise NotFound(f"there is no {str(path)!r}", hint="check the path")
    check_links(real, roots())
    for entry, target in links(real):
        if _private(target):
            raise Forbidden(f"{entry.name} is a link to Speclab's own files", where=str(entry))
    return real


def roots() -> list[Path]:
    """The directories below which people may name files in pages and REST."""
    hub = os.environ.get("HF_HUB_CACHE") or Path(
        os.environ.get("HF_HOME", "~/.cache/huggingface"), "hub"
    )
    further = (settings().roots or "").split(os.pathsep)
    places = [Path.home(), settings().home, Path(hub), *(Path(one) for one in further if one)]
    return [Path(os.path.realpath(place.expanduser())) for place in places]


def inspect_checkpoint(
    path: str, verifier: str | None = None, settled: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What a checkpoint is, what each of its tensors would become, and what is doubtful.

    `settled` are further parameters of its conversion. Raises `Forbidden` where a file of either
    is a link out of `roots`.
    """
    from speculators_core.conversion.inspect import inspect

    target = resolve(verifier, "verifier") if verifier else None
    source = resolve(path, "checkpoint")
    return inspect(source, target, roots=roots(), settled=settled).model_dump(mode="json")


def _output(run_id: str, name: str) -> str:
    run = runs.get(run_id)
    if run.state is not RunState.SUCCEEDED:
        raise Conflict(
            f"run {run_id} ({run.name}) is {run.state.value}: it has no output yet",
            where=f"run:{run_id}",
        )
    path = (run.result or {}).get(name)
    if not isinstance(path, str):
        known = ", ".join(run.result or ()) or "nothing"
        raise InputError(f"run {run_id} recorded no {name!r}", hint=f"it recorded: {known}")
    if not Path(path).exists():
        raise NotFound(f"the output of run {run_id} is gone", where=path, hint="run it again")
    return path


def _registered(name: str, field: str | None) -> str | None:
    first = _REGISTRY_OF.get(field or "")
    order = sorted(_REGISTRIES, key=lambda kind: kind != first)
    with reading() as session:
        for table in (_REGISTRIES[kind] for kind in order):
            path = session.scalar(select(table.path).where(table.name == name))
            if path is not None:
                if not Path(path).exists():
                    raise NotFound(f"the directory of {name} is gone: {path}")
                return path
    return None


def _unknown(reference: str) -> NotFound:
    if _looks_like_path(reference):
        return NotFound(f"there is no {reference!r}", hint="check the path")
    if is_hub_id(reference):
        return NotFound(
            f"there is no directory {reference!r}, though there is one that it would lie in",
            hint=f"check its name; the repository of the hub is written {reference}@main",
        )
    with reading() as session:
        names = [n for t in _REGISTRIES.values() for n in session.scalars(select(t.name))]
    near = difflib.get_close_matches(reference, names, n=3)
    return NotFound(
        f"{reference!r} is no registered name, no path and no hub id (owner/name)",
        hint=f"did you mean {', '.join(near)}?" if near else "see the Models page for names",
    )


def _looks_like_path(reference: str) -> bool:
    return reference.startswith(("/", "./", "../", "~")) or reference in (".", "..")


def _place(path: str) -> Path:
    """The path as the file system takes it."""
    try:
        if "\x00" in path:
            raise ValueError("a NUL byte")
        if len(path) > _LONGEST_PATH or any(len(os.fsencode(p)) > 255 for p in path.split("/")):
            raise ValueError("it is too long for a file system")
        return Path(path).expanduser()
    except (ValueError, RuntimeError) as error:  # RuntimeError: ~user of an unknown user
        raise InputError(f"{path[:80]!r} can't be a path: {error}") from None


def _names_path(reference: str) -> bool:
    """Whether `resolve` would look at the file system for it."""
    if split_reference(reference) or reference.startswith("wheel:"):
        return False
    if _looks_like_path(reference):
        return True
    place = _place(reference)
    return _registered(reference, None) is None and place.exists()


def _each_reference(params: Mapping[str, Any], change: Callable[[str, str], str]) -> dict[str, Any]:
    def changed(value: Any, field: str) -> Any:
        if isinstance(value, (list, tuple)):
            return [changed(item, field) for item in value]
        return change(value, field) if isinstance(value, str) else value

    return {f: changed(v, f) if f in _REGISTRY_OF else v for f, v in params.items()}


def _private(real: Path) -> bool:
    """Files that lie in SPECLAB_HOME itself (the store, secrets), and some of its directories."""
    home = Path(os.path.realpath(settings().home))
    if not real.is_relative_to(home) or real == home:
        return False
    first, *deeper = real.relative_to(home).parts
    return first in _PRIVATE or (not deeper and not real.is_dir())
