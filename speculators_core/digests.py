"""Hashes of whole files, remembered where reading them again would take long.

A large file's hash is kept in the user's cache directory under its device, inode, size and times
of last change (of the content and, what nobody can set back, of the inode): any of them differs
when the bytes do, so a file that was replaced by one of the same size is read again. Light.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from contextlib import suppress
from pathlib import Path

_WORTH_KEEPING = 64 << 20  # bytes; less is read as fast as looked up


def of_file(file: Path) -> str:
    """SHA-256 of the file's bytes."""
    found = file.stat()
    if found.st_size < _WORTH_KEEPING:
        return _read(file)
    identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    kept = _place() / "-".join(map(str, identity))
    with suppress(OSError):
        text = kept.read_text()
        if len(text) == 64:
            return text
    digest = _read(file)
    if file.stat().st_ctime_ns == found.st_ctime_ns:  # else it was written to while it was read
        _keep(kept, digest)
    return digest


def _place() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "speclab" / "digests"


def _read(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _keep(kept: Path, digest: str) -> None:
    """Where nothing can be kept, it is read again next time."""
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_name(f"{kept.name}.{uuid.uuid4().hex[:8]}.partial")
        partial.write_text(digest)
        partial.rename(kept)
