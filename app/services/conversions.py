"""Conversions: what they left beside the weights and measured, and once more with a choice."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from app.services import runs, speculators
from app.services.views import RunView
from app.store.models import RunState
from speculators_core.errors import CheckpointError, InputError, NotFound
from speculators_core.params import JobKind

REPORT = "conversion_report.json"
CARD = "README.md"
_LARGEST = 8_000_000  # bytes; a report of thousands of tensors has one
_LOOKED_AT = 50


def report(name: str) -> dict[str, Any]:
    """The conversion report of a registered speculator.

    Raises `NotFound` where it was not converted here, `CheckpointError` where the file is damaged.
    """
    file = report_path(name)
    try:
        found = json.loads(_text(file))
    except ValueError as error:
        raise CheckpointError("the conversion report is damaged", where=str(file)) from error
    if not isinstance(found, dict):
        raise CheckpointError("the conversion report is no JSON object", where=str(file))
    return found


def card(name: str) -> str:
    """The text of a registered speculator's README.md. Raises `NotFound`."""
    return _text(card_path(name))


def report_path(name: str) -> Path:
    """The report as a file. Raises `NotFound`."""
    return _file(name, REPORT)


def card_path(name: str) -> Path:
    """The card as a file. Raises `NotFound`."""
    return _file(name, CARD)


def measured(checkpoint: str, verifier: str | None) -> dict[str, float]:
    """First-token acceptance by choice (`choice_key`), as earlier conversions of this checkpoint on
    this verifier measured it; the newest counts.
    """
    found: dict[str, float] = {}
    past = runs.list_runs(kind=JobKind.CONVERT, state=RunState.SUCCEEDED, limit=_LOOKED_AT)
    for run in past.items:
        if (run.params.get("checkpoint"), run.params.get("verifier")) == (checkpoint, verifier):
            for choice in _choices(run.result or {}):
                accepted = choice.get("first_token_acceptance")
                if accepted is not None:
                    found.setdefault(choice_key(choice["params"]), accepted)
    return found


def choice_key(params: Mapping[str, Any]) -> str:
    """Equal for choices that set the same parameters to the same values."""
    return json.dumps(params, sort_keys=True)


def again(run_id: str, doubt: int, choice: int, who: str) -> RunView:
    """Convert what a run converted once more, with one of the choices that it left.

    Raises `NotFound`, `InputError` where the run left no such choice.
    """
    run = runs.get(run_id)
    try:
        chosen = (run.result or {})["doubts"][doubt]["choices"][choice]["params"]
    except (LookupError, TypeError) as error:
        raise InputError(
            f"run {run_id} left no choice {choice} of a doubt {doubt}",
            hint="open the run anew: its choices are listed there",
        ) from error
    params = {**run.params, **chosen}
    return runs.submit(JobKind.CONVERT, params, owner=who, name=run.name)


def _choices(result: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for doubt in result.get("doubts") or ():
        yield from doubt.get("choices") or ()


def _file(name: str, file: str) -> Path:
    path = Path(speculators.get(name).path, file)
    if path.is_symlink() or not path.is_file():
        raise NotFound(f"{name} has no {file}", hint="conversions write it, and trainings do not")
    return path


def _text(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise CheckpointError(f"{path.name} is larger than {_LARGEST} bytes", where=str(path))
    return content.decode("utf-8", errors="replace")
