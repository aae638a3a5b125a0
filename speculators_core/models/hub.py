"""Models that are named by a path or a hub id, as directories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from speculators_core.errors import CheckpointError, NotFound, Unavailable
from speculators_core.hub.download import cached, fetch
from speculators_core.hub.reference import is_hub_id, means_directory, parse_hub_id
from speculators_core.progress import Progress

NO_CODE = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
CHECKPOINT = ("*.json", "*.safetensors", "*.bin")


def here(reference: str | Path) -> Path | None:
    """The directory of this machine that is meant; None where it is a repository of the hub.

    Raises `NotFound` for what is neither, `CheckpointError` for a file.
    """
    text = str(reference)
    try:
        path = Path(reference).expanduser()
        is_directory, exists = path.is_dir(), path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, or ~user of nobody
        raise NotFound(f"this can't be a path: {error}", where=text[:200]) from error
    if is_directory:
        return path
    if exists:
        raise CheckpointError(
            "this is a file; a directory with config.json and weights is expected",
            where=str(path),
            hint=f"give its directory: {path.parent}",
        )
    if not is_hub_id(text):
        raise NotFound(
            "there is no such directory",
            where=text,
            hint="give a directory, or a hub id such as org/name",
        )
    if means_directory(text):
        raise NotFound(
            f"there is no such directory, though there is {path.parent}",
            where=text,
            hint=f"check its name; the repository of the hub is written {text}@main",
        )
    return None


def bring(
    reference: str | Path, patterns: Sequence[str] = NO_CODE, progress: Progress | None = None
) -> Path:
    """The directory of a model given by path or hub id. Raises as `here` and `snapshot`."""
    return here(reference) or snapshot(str(reference), patterns, progress)


def snapshot(
    hub_id: str, patterns: Sequence[str] = NO_CODE, progress: Progress | None = None
) -> Path:
    """The files that match, downloaded unless they are cached: weights as safetensors,
    configuration and tokenizer unless something else is asked for.

    Raises `NotFound` (the hub has no such model), `Forbidden` (it is not for everybody),
    `Unavailable` (it is neither here nor in the hub's cache, and the hub can't be reached).
    """
    wanted = parse_hub_id(hub_id)
    try:
        return fetch(wanted, patterns, progress).directory
    except Unavailable:
        if found := cached(wanted, patterns):
            return found
        raise
