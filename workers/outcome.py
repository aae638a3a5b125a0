"""How a job's work ended, left in the run's directory for whoever concludes the run.

`outcome.json` holds `{"result": {…}}` or `{"error": {kind, message, where, hint}}`. It is a file,
so that a job can end while the store is away, and so that a run whose supervisor died after the
work was done is not done again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.settings import settings

DONE, FAILED, STOPPED = 0, 1, 3
"""Exit statuses of a job process."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """At most one of the two is there."""

    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


def read_outcome(run_id: str) -> Outcome:
    """What the run's latest attempt left; empty when it left nothing that can be read."""
    try:
        told = json.loads(_file(run_id).read_text())
        return Outcome(told.get("result"), told.get("error"))
    except (OSError, ValueError, AttributeError):
        return Outcome()


def write_result(run_id: str, result: Mapping[str, Any]) -> None:
    _write(run_id, {"result": dict(result)})


def write_error(run_id: str, error: Mapping[str, Any]) -> None:
    _write(run_id, {"error": dict(error)})


def clear_error(run_id: str) -> None:
    """Before a new attempt; a result stays, for it is not worked for twice."""
    if read_outcome(run_id).result is None:
        _file(run_id).unlink(missing_ok=True)


def finished_result(run_id: str) -> dict[str, Any] | None:
    """The result of an earlier attempt that ended well but was never recorded, if it is there."""
    result = read_outcome(run_id).result
    if result is None or not Path(result.get("output", "/")).exists():
        return None
    return result


def write_params(run_id: str, params: Mapping[str, Any]) -> None:
    """`params.json`: the parameters as the job sees them, references resolved."""
    _replace(settings().run_dir(run_id) / "params.json", params)


def _write(run_id: str, told: Mapping[str, Any]) -> None:
    _replace(_file(run_id), told)


def _file(run_id: str) -> Path:
    return settings().run_dir(run_id) / "outcome.json"


def _replace(file: Path, content: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.write_text(json.dumps(content, indent=2))
    draft.replace(file)
