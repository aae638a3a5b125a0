"""Models of the Hugging Face hub, as directories in its own cache."""

from __future__ import annotations

from pathlib import Path

from speculators_core.errors import InputError, Unavailable

_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def snapshot(hub_id: str) -> Path:
    """The model's directory, downloaded where it is not there yet: weights as safetensors,
    config and tokenizer; no code and no pickles.

    Raises `InputError` (no such model) or `Unavailable` (no connection, nothing in the cache).
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_FILES))
    except RepositoryNotFoundError as error:
        raise InputError(
            "the hub has no such model, or it is private",
            where=hub_id,
            hint="check the id; for a private one set HF_TOKEN where the worker runs",
        ) from error
    except Exception as error:  # the hub client raises its transport's own errors
        raise Unavailable(
            f"the model is not in the hub's cache and the hub can't be reached "
            f"({type(error).__name__})",
            where=hub_id,
            hint="download the model elsewhere and give its directory",
        ) from error
