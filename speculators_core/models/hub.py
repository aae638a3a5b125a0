"""Models that are named by a path or a hub id, as directories."""

from __future__ import annotations

from pathlib import Path

from speculators_core.errors import CheckpointError, NotFound, Unavailable
from speculators_core.hub.download import Listing, cached, fetch, listing
from speculators_core.hub.reference import is_hub_id, means_directory, parse_hub_id
from speculators_core.progress import Progress

NO_CODE = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


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


def bring(reference: str | Path, progress: Progress | None = None) -> Path:
    """The directory of a model given by path or hub id. Raises as `here` and `snapshot`."""
    return here(reference) or snapshot(str(reference), progress)


def bring_checkpoint(reference: str | Path, progress: Progress | None = None) -> Path:
    """The directory of somebody's draft, given by path or hub id. Raises as `bring`."""
    if directory := here(reference):
        return directory
    wanted = parse_hub_id(str(reference))
    try:
        return fetch(wanted, checkpoint_files(listing(wanted)), progress).directory
    except Unavailable:
        for weights in ("*.safetensors", "*.bin"):
            if (found := cached(wanted, (*NO_CODE, weights))) and any(found.glob(weights)):
                return found
        raise


def checkpoint_files(found: Listing) -> tuple[str, ...]:
    """What of a repository is fetched to convert or register it: its card, too; never code, and
    pickles only where there are no safetensors.
    """
    safe = any(file.name.endswith(".safetensors") for file in found.files)
    return (*NO_CODE, "*.md", *(() if safe else ("*.bin",)))


def snapshot(hub_id: str, progress: Progress | None = None) -> Path:
    """A model, downloaded unless it is cached: weights as safetensors, configuration, tokenizer.

    Raises `NotFound` (the hub has no such model), `Forbidden` (it is not for everybody),
    `Unavailable` (it is neither here nor in the hub's cache, and the hub can't be reached).
    """
    wanted = parse_hub_id(hub_id)
    try:
        return fetch(wanted, NO_CODE, progress).directory
    except Unavailable:
        if found := cached(wanted, NO_CODE):
            return found
        raise
