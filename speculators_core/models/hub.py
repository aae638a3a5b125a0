"""Models of the Hugging Face hub, as directories in its own cache."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from speculators_core.errors import NotFound, Unavailable

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
NO_CODE = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


def local_model(reference: str) -> str:
    """The directory of a model given by path or hub id; anything else is returned as it is.

    Raises `NotFound` (the hub has no such model) or `Unavailable` (it is neither here nor in the
    hub's cache, and the hub can't be reached).
    """
    if Path(reference).exists() or not is_hub_id(reference):
        return reference
    return str(snapshot(reference))


def is_hub_id(reference: str) -> bool:
    """Whether it is written like `org/name`."""
    return _HUB_ID.fullmatch(reference) is not None


def snapshot(hub_id: str, patterns: Sequence[str] = NO_CODE) -> Path:
    """The files that match, downloaded unless they are cached: weights as safetensors,
    configuration and tokenizer unless something else is asked for. Raises as `local_model`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(patterns)))
    except RepositoryNotFoundError as error:
        raise NotFound(
            "there is no such directory, and the hub has no such model",
            where=hub_id,
            hint="check the id; for a private model set HF_TOKEN",
        ) from error
    except Exception as error:  # the hub's client raises whatever its transport does
        raise Unavailable(
            f"there is no such directory, and the hub can't be reached ({type(error).__name__})",
            where=hub_id,
            hint="check the path, or download the model elsewhere and give its directory",
        ) from error
