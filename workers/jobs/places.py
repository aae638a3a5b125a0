"""Where jobs put what they make, and what it is called."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from app.services.views import RunView
from app.settings import settings

_LONGEST_NAME = 80


class Registered(Protocol):
    """A row of a registry."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> str: ...


def artifacts(run: RunView) -> Path:
    """The run's own directory for what it makes."""
    return settings().run_dir(run.id) / "artifacts"


def speculator_directory(name: str, run: RunView) -> Path:
    """A directory that only this run writes, the same at each attempt, cleared of an earlier
    attempt that died between its last file and its last word."""
    return cleared(settings().home / "speculators" / f"{name}-{run.id}")


def cleared(directory: Path) -> Path:
    """The path, with nothing there."""
    if directory.exists():
        shutil.rmtree(directory)
    return directory


def content_key(facts: Mapping[str, Any]) -> str:
    """A directory name that is equal exactly where the facts are."""
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def output_name(run: RunView, otherwise: str) -> str:
    """What the run's product is called: as its person named the run, else `otherwise`."""
    words = run.kind.value.replace("_", "-")
    given = not run.name.startswith((f"{words} ", "Demo: "))
    return slug(run.name if given else otherwise)


def slug(text: str) -> str:
    """Letters, digits, dots, dashes and underscores, fit for a folder and a URL."""
    found = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")
    return found[:_LONGEST_NAME] or "unnamed"


def name_of(path: str, known: Iterable[Registered]) -> str:
    """The name that a path is registered under; the path itself where it is not."""
    return next((row.name for row in known if row.path == path), path)
