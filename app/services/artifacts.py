"""The files that a run left in its own directory."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from app.services import runs
from app.services.views import View
from app.settings import settings
from speculators_core.errors import NotFound


class Artifact(View):
    """A file; fetch it at `/api/runs/{id}/artifacts/{path}`."""

    path: str
    size: int = Field(description="bytes")


def list_files(run_id: str) -> list[Artifact]:
    """All files, by name. Raises `NotFound` where there is no such run."""
    root = _root(run_id)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return [Artifact(path=str(p.relative_to(root)), size=p.stat().st_size) for p in files]


def file_of(run_id: str, path: str) -> Path:
    """One file of a run, never one outside it. Raises `NotFound`."""
    root = _root(run_id)
    try:
        file = (root / path).resolve()
        known = file.is_relative_to(root) and file.is_file()
    except (OSError, ValueError):  # longer than a name can be; a NUL byte
        known = False
    if not known:
        raise NotFound(f"run {run_id} has no artifact {path!r}", hint="list them without a path")
    return file


def _root(run_id: str) -> Path:
    runs.get(run_id)
    return (settings().run_dir(run_id) / "artifacts").resolve()
