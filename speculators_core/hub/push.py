"""Upload a speculator to the hub: private unless asked otherwise, one commit, no local paths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from speculators_core.config import read_json
from speculators_core.conversion.card import with_serving
from speculators_core.errors import CheckpointError, Conflict, Forbidden, InputError, Stopped
from speculators_core.hub.client import api, endpoint, speaking, token
from speculators_core.hub.reference import HubId, is_hub_id, parse_hub_id
from speculators_core.launch import Served, portable_name, read_served
from speculators_core.params import LaunchParams, PushParams
from speculators_core.progress import Progress, Quiet

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

_FILES = ("*.safetensors", "*.safetensors.index.json", "config.json", "README.md", "*_report.json")


class PushResult(BaseModel):
    """What `speclab push --json` prints. `revision`: the commit that holds the files."""

    model_config = ConfigDict(frozen=True)

    repository: str
    revision: str
    url: str
    private: bool
    files: list[str]


def push(params: PushParams, progress: Progress | None = None) -> PushResult:
    """Commit the files of a speculator directory to `repository`, which is made where it is
    missing.

    Raises `InputError` where the verifier is named by a path of this machine, `Forbidden` without
    a token or the right to write, `Conflict` where the repository is public and `private` was
    asked for, and as the hub's other doors.
    """
    progress = progress or Quiet()
    hub_id = parse_hub_id(params.repository)
    if not token():
        raise Forbidden(
            "HF_TOKEN is not set: the hub takes uploads only from somebody",
            where=f"{endpoint()}: {hub_id}",
            hint="export HF_TOKEN=… (a token with the right to write) and try again",
        )
    directory = Path(params.speculator)
    operations = _operations(directory, hub_id, params)
    progress.update(0.05, f"preparing {hub_id.repository}")
    with speaking(hub_id):
        private = _repository(hub_id, params.private)
        if progress.stopping():
            raise Stopped("the upload was stopped before anything was sent")
        names = [operation.path_in_repo for operation in operations]
        progress.update(0.1, f"uploading {', '.join(names)}")
        made = api().create_commit(
            hub_id.repository,
            operations,
            commit_message="Upload speculator",
            revision=params.revision,
        )
    progress.update(1.0, f"uploaded as commit {made.oid[:12]}")
    return PushResult(
        repository=hub_id.repository,
        revision=made.oid,
        url=f"{endpoint()}/{hub_id.repository}",
        private=private,
        files=names,
    )


def _repository(hub_id: HubId, private: bool) -> bool:
    """Make the repository unless it is there; whether it is private."""
    hub = api()
    hub.create_repo(hub_id.repository, private=private, exist_ok=True)
    found = bool(hub.model_info(hub_id.repository).private)
    if private and not found:
        raise Conflict(
            "the repository is there already, and everybody sees it",
            where=f"{endpoint()}: {hub_id.repository}",
            hint="push to another name, make it private on its page, or say --no-private",
        )
    return found


def _operations(directory: Path, hub_id: HubId, params: PushParams) -> list[CommitOperationAdd]:
    from huggingface_hub import CommitOperationAdd

    files = sorted({file for pattern in _FILES for file in directory.glob(pattern)})
    names = {file.name for file in files}
    if "config.json" not in names or not any(n.endswith(".safetensors") for n in names):
        raise CheckpointError(
            "the directory holds no speculator: config.json and safetensors weights are expected",
            where=str(directory),
            hint="convert or train one first",
        )
    config, served = _portable_config(directory, hub_id, params)
    changed: dict[str, bytes] = {"config.json": config}
    if "README.md" in names:
        card = (directory / "README.md").read_text(encoding="utf-8")
        changed["README.md"] = with_serving(card, served).encode()
    return [CommitOperationAdd(file.name, changed.get(file.name, str(file))) for file in files]


def _portable_config(directory: Path, hub_id: HubId, params: PushParams) -> tuple[bytes, Served]:
    """config.json as other machines can use it, and what the launch lines say then."""
    asked = LaunchParams(speculator=str(directory), verifier_name=params.verifier_name)
    served = read_served(asked)
    verifier = portable_name(served.verifier)
    if not is_hub_id(verifier):
        raise InputError(
            f"the verifier is named by a path, and {verifier!r} means nothing elsewhere",
            where=str(directory / "config.json"),
            hint="give its hub id: --verifier-name ORG/NAME",
        )
    config = read_json(directory / "config.json")
    if isinstance(block := config.get("speculators_config"), dict):
        block["verifier"] = {**block.get("verifier", {}), "name_or_path": verifier}
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    served = served.model_copy(update={"verifier": verifier, "model": hub_id.repository})
    return text.encode(), served
