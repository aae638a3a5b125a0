"""A snapshot of a repository in the hub's own cache, with progress, and going on after a kill.

huggingface_hub 2 starts a file over when its process died, so the bytes are fetched here: into
`blobs/<etag>.part`, from where an earlier attempt ended, checked against the hub's hash, and
renamed to the name that its cache gives them. Then `snapshot_download` finds all there and keeps
its books. Light: no torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO

from speculators_core.errors import Stopped, Unavailable
from speculators_core.hub.client import (
    api,
    asking,
    damaged,
    endpoint,
    speaking,
    transport_errors,
    unreachable,
)
from speculators_core.hub.reference import HubId
from speculators_core.progress import Progress, Quiet

_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_CHUNK = 1 << 20
_ATTEMPTS = 5  # in a row that bring nothing
_EVERY_S = 0.1  # of progress
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository. `digest`: sha256 of a large file, git's sha1 of a small one."""

    name: str
    size: int
    digest: str
    large: bool


@dataclass(frozen=True)
class Listing:
    """A repository at one commit."""

    hub_id: HubId
    private: bool
    files: tuple[RemoteFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class Snapshot:
    """Where the files lie, and what they are: a commit, so the same for ever."""

    directory: Path
    hub_id: HubId
    size: int


def listing(hub_id: HubId, patterns: Sequence[str] = ("*",)) -> Listing:
    """What matches in the repository, its revision settled to a commit. One request."""
    with speaking(hub_id):
        info = api().model_info(hub_id.repository, revision=hub_id.revision, files_metadata=True)
    files = tuple(
        RemoteFile(
            s.rfilename, s.size or 0, (s.lfs.sha256 if s.lfs else s.blob_id) or "", bool(s.lfs)
        )
        for s in info.siblings or ()
        if any(fnmatch(s.rfilename, pattern) for pattern in patterns)
    )
    for file in files:
        if not _DIGEST.fullmatch(file.digest):  # it becomes a file's name
            raise Unavailable(
                f"the hub describes {file.name!r} by {file.digest!r}, expected a hash",
                where=f"{endpoint()}: {hub_id}",
                hint="is HF_ENDPOINT a hub?",
            )
    return Listing(HubId(hub_id.repository, info.sha), bool(info.private), files)


def fetch(
    hub_id: HubId, patterns: Sequence[str] = ("*",), progress: Progress | None = None
) -> Snapshot:
    """Download what matches, unless it is here already; `progress` runs from 0 to 1.

    Raises `NotFound`, `Forbidden` (gated, or not for this token), `Unavailable` (hub or disk),
    `CheckpointError` (other bytes than the hub describes), `Stopped` on request: what has arrived
    is used when the download goes on.
    """
    progress = progress or Quiet()
    found = listing(hub_id, patterns)
    _download(found, progress)
    with speaking(hub_id):
        directory = api().snapshot_download(
            found.hub_id.repository,
            revision=found.hub_id.revision,
            allow_patterns=[file.name for file in found.files],
        )
        if not hub_id.pinned:
            _remember(hub_id, str(found.hub_id.revision))
    return Snapshot(Path(directory), found.hub_id, found.size)


def cached(hub_id: HubId, patterns: Sequence[str] = ("*",)) -> Path | None:
    """The snapshot's directory where all that matches is here; asks nobody."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(
            api().snapshot_download(
                hub_id.repository,
                revision=hub_id.revision,
                allow_patterns=list(patterns),
                local_files_only=True,
            )
        )
    except LocalEntryNotFoundError:
        return None


def _download(found: Listing, progress: Progress) -> None:
    blobs = _folder(found.hub_id) / "blobs"
    missing = [file for file in found.files if not (blobs / file.digest).exists()]
    meter = _Meter(found, missing, progress)
    if not missing:
        return
    progress.note(
        f"{found.hub_id}: {len(found.files)} files, {_megabytes(found.size)}; "
        f"{_megabytes(sum(f.size for f in missing))} to download"
    )
    with speaking(found.hub_id):
        blobs.mkdir(parents=True, exist_ok=True)
        _check_space(blobs, missing)
        for file in missing:
            with _part(blobs / f"{file.digest}.part", meter) as part:
                if not (blobs / file.digest).exists():  # another download may have been quicker
                    _fill(part, file, found.hub_id, meter)
                    Path(part.name).rename(blobs / file.digest)


class _Meter:
    """Bytes that are here, of all that are wanted."""

    def __init__(self, found: Listing, missing: Sequence[RemoteFile], progress: Progress) -> None:
        self.progress = progress
        self.hub_id, self.total = found.hub_id, found.size
        self._here = found.size - sum(file.size for file in missing)
        self._began, self._told, self._fetched = time.monotonic(), 0.0, 0

    def add(self, count: int, name: str, *, fetched: bool) -> None:
        self._here += count
        self._fetched += count if fetched else 0
        if self._here < self.total and time.monotonic() - self._told < _EVERY_S:
            return
        self._told = time.monotonic()
        rate = self._fetched / max(time.monotonic() - self._began, 1e-3)
        left = (self.total - self._here) / rate if self._fetched > 0 else None
        self.progress.update(
            min(self._here / max(self.total, 1), 1.0),
            f"{name}: {_megabytes(self._here)} of {_megabytes(self.total)}",
            left,
        )

    def check_stop(self) -> None:
        if self.progress.stopping():
            raise Stopped(
                f"the download was stopped at {_megabytes(self._here)} of "
                f"{_megabytes(self.total)}; the next one goes on from there"
            )


@contextmanager
def _part(path: Path, meter: _Meter) -> Iterator[BinaryIO]:
    """The file that bytes are gathered in, held by one download at a time."""
    with path.open("a+b") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                meter.check_stop()
                meter.progress.update(None, "another download of this file is going on")
                time.sleep(0.5)
        yield file


def _fill(part: BinaryIO, file: RemoteFile, hub_id: HubId, meter: _Meter) -> None:
    """Bring `part` to its full size and check what it holds."""
    digest = hashlib.sha256() if file.large else hashlib.sha1(b"blob %d\0" % file.size)
    part.seek(0)
    while chunk := part.read(_CHUNK):
        digest.update(chunk)
        meter.add(len(chunk), file.name, fetched=False)
    left = _ATTEMPTS
    while part.tell() < file.size:
        before = part.tell()
        try:
            for chunk in _chunks(hub_id, file, before):
                part.write(chunk)
                digest.update(chunk)
                meter.add(len(chunk), file.name, fetched=True)
                meter.check_stop()
        except transport_errors() as error:
            left = _ATTEMPTS if part.tell() > before else left - 1
            if not left:
                raise unreachable(hub_id, error) from error
            meter.progress.note(f"the connection broke ({type(error).__name__}): going on")
            time.sleep(1)
            continue
        if part.tell() == before:
            break
    part.flush()
    os.fsync(part.fileno())
    if part.tell() != file.size or digest.hexdigest() != file.digest:
        Path(part.name).unlink()
        raise damaged(hub_id, file.name)


def _chunks(hub_id: HubId, file: RemoteFile, start: int) -> Iterator[bytes]:
    """The bytes of a file from `start` on."""
    with asking(hub_id, file.name, start) as response:
        skip = start if response.status_code != 206 else 0  # a server may ignore the range
        for chunk in response.iter_bytes():  # as it comes, so that little is lost with it
            yield chunk[skip:]
            skip = max(skip - len(chunk), 0)


def _check_space(blobs: Path, missing: Sequence[RemoteFile]) -> None:
    needed = sum(file.size - _size(blobs / f"{file.digest}.part") for file in missing)
    require_space(needed, blobs)


def require_space(needed: int, place: Path) -> None:
    """Raise `Unavailable` where a download of so many bytes would fill the disk of `place`."""
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed + _SPARE_BYTES > free:
        raise Unavailable(
            f"the download needs {_megabytes(needed)}, {_megabytes(free)} are free",
            where=str(place),
            hint="free some space, or set HF_HOME to a larger disk",
        )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _remember(hub_id: HubId, commit: str) -> None:
    """What a branch or tag meant last, for when the hub is away."""
    reference = _folder(hub_id) / "refs" / (hub_id.revision or "main")
    reference.parent.mkdir(parents=True, exist_ok=True)
    draft = reference.with_name(f"{reference.name}.{os.getpid()}.new")
    draft.write_text(commit, encoding="utf-8")
    draft.replace(reference)


def _folder(hub_id: HubId) -> Path:
    """Where the hub's cache keeps a repository: bytes in `blobs` by their hash, commits of
    branches in `refs` (huggingface_hub's manual).
    """
    from huggingface_hub import constants

    folder = "models--" + hub_id.repository.replace("/", "--")
    return Path(constants.HF_HUB_CACHE).expanduser() / folder


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"
