"""Models of the Hugging Face hub, as directories in its own cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from speculators_core.errors import Unavailable
from speculators_core.hub.download import cached, fetch
from speculators_core.hub.reference import is_hub_id, parse_hub_id
from speculators_core.progress import Progress
from speculators_core.untrusted import is_here

NO_CODE = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


def local_model(reference: str, progress: Progress | None = None) -> str:
    """The directory of a model given by path or hub id; anything else is returned as it is.

    Raises as `snapshot`.
    """
    if is_here(reference) or not is_hub_id(reference):
        return reference
    return str(snapshot(reference, progress=progress))


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
        if here := cached(wanted, patterns):
            return here
        raise
