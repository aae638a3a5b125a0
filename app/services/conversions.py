"""Conversions: what they left beside the weights and measured, and once more with a choice."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from app.services import runs, speculators
from app.services.verdict import REPORT
from app.services.views import RunView
from app.store.models import RunState
from speculators_core.config import read_json
from speculators_core.errors import InputError, NotFound
from speculators_core.params import JobKind
from speculators_core.untrusted import read_bounded

CARD = "README.md"
_CARD_BYTES = 8_000_000
_LOOKED_AT = 50


def report(name: str) -> dict[str, Any]:
    """The conversion report of a registered speculator.

    Raises `NotFound` where it was not converted here, `CheckpointError` where the file is damaged.
    """
    return read_json(report_path(name))


def card(name: str) -> str:
    """The text of a registered speculator's README.md. Raises `NotFound`."""
    return read_bounded(card_path(name), _CARD_BYTES).decode("utf-8", errors="replace")


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
        raise NotFound(
            f"{name} has no {file}",
            hint="what came from elsewhere may have none: a conversion writes it",
        )
    return path
