"""How a repository of the Hugging Face hub is written: `org/name`, or `org/name@revision`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from speculators_core.errors import InputError

_NAME = r"[A-Za-z0-9][\w.-]*"
_REVISION = r"\w[\w.-]*(/\w[\w.-]*)*"  # it may become a path below the cache
_HUB_ID = re.compile(rf"(?P<repository>{_NAME}/{_NAME})(@(?P<revision>{_REVISION}))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubId:
    """A repository, and the branch, tag or commit that is meant (None: the newest)."""

    repository: str
    revision: str | None = None

    @property
    def pinned(self) -> bool:
        """Whether the revision is a commit, so that it always means the same files."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}" if self.revision else self.repository


def is_hub_id(reference: str) -> bool:
    """Whether it is written like `org/name` or `org/name@revision`."""
    return _HUB_ID.fullmatch(reference) is not None


def means_directory(reference: str) -> bool:
    """Whether a text that is written like a hub id is more likely a directory that is not there:
    what it would lie in is. Written with a revision (`org/name@main`) it means the hub alone.
    """
    parent, _, name = reference.partition("/")
    return bool(name) and "@" not in name and Path(parent).is_dir()


def parse_hub_id(reference: str, revision: str | None = None) -> HubId:
    """The repository that is meant. Raises `InputError` where it is not written like one, or two
    revisions are named.
    """
    match = _HUB_ID.fullmatch(reference)
    if match is None:
        raise InputError(
            f"{reference!r} is no repository of the hub", hint="write it like org/name"
        )
    if revision and not re.fullmatch(_REVISION, revision):
        raise InputError(f"{revision!r} is no revision", hint="give a branch, a tag or a commit")
    if revision and match["revision"] and revision != match["revision"]:
        raise InputError(
            f"two revisions are named: {match['revision']} and {revision}", hint="name one"
        )
    return HubId(match["repository"], revision or match["revision"])


def repository_of(path: str | Path) -> HubId | None:
    """The repository and commit that a directory of the hub's cache holds; None for any other.

    The cache's layout is `models--ORG--NAME/snapshots/COMMIT` (huggingface_hub's manual).
    """
    parts = Path(path).parts
    for folder, snapshots, commit in zip(parts, parts[1:], parts[2:], strict=False):
        kind, _, rest = folder.partition("--")
        if kind == "models" and snapshots == "snapshots" and _COMMIT.fullmatch(commit):
            return HubId(rest.replace("--", "/", 1), commit)
    return None
