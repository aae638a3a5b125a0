"""What runs are called: by a person, or by what they work on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from speculators_core.errors import InputError
from speculators_core.params import JobKind

LONGEST = 200
_MAIN_FIELD = {
    JobKind.VERIFIER: "name",
    JobKind.REGENERATE: "data",
    JobKind.PREPARE: "data",
    JobKind.EVALUATE: "speculator",
    JobKind.CONVERT: "checkpoint",
    JobKind.EXPORT: "speculator",
    JobKind.PULL: "repository",
    JobKind.PUSH: "speculator",
    JobKind.DEPLOY: "speculator",
}


def given(name: str) -> str:
    """A name that a person gave. Raises `InputError`."""
    name = clean(name).strip()
    if not 1 <= len(name) <= LONGEST:
        raise InputError(f"a name has 1 to {LONGEST} characters, found {len(name)}")
    return name


def default(kind: JobKind, params: Mapping[str, Any]) -> str:
    """The kind, and what the run works on first."""
    about = params.get(_MAIN_FIELD.get(kind, "verifier")) or params.get("verifier") or ""
    first, *more = about if isinstance(about, list) else [about]
    if first.startswith("run:"):
        first = str(params.get("verifier") or first)
    words = [kind.value.replace("_", "-"), PurePath(first).name or first]
    words += [f"and {len(more)} more"] if more else []
    return clean(" ".join(words))[:LONGEST]


def clean(text: str) -> str:
    """Without the one character that PostgreSQL can't keep."""
    return text.replace("\x00", "\ufffd")
