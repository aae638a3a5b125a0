"""SHA-256 of files, computed beside other work: a thread reads them while they are converted.

Hashing leaves Python's lock alone, so that a second core does it (about 1 GB/s). What the hub's
cache keeps needs no reading: a large file's name there is its hash, checked when it was downloaded.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Sequence
from pathlib import Path

from speculators_core.untrusted import open_regular

_PIECE = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Digests:
    """The hashes of some files, begun at once; as a context it ends the reading with the block."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._found: dict[str, str] = {}
        self._failed: Exception | None = None
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._read, name="sha256", daemon=True)
        self._thread.start()

    def wait(self) -> dict[str, str]:
        """Hexadecimal digests by file name. Raises what reading a file raised."""
        self._thread.join()
        if self._failed:
            raise self._failed
        return self._found

    def __enter__(self) -> Digests:
        return self

    def __exit__(self, *_: object) -> None:
        self._given_up.set()
        self._thread.join()

    def _read(self) -> None:
        try:
            for file in self._files:
                self._found[file.name] = known_digest(file) or self._digest(file)
        except Exception as error:  # raised again in the thread that waits
            self._failed = error

    def _digest(self, file: Path) -> str:
        digest = hashlib.sha256()
        with open_regular(file) as content:
            while not self._given_up.is_set() and (piece := content.read(_PIECE)):
                digest.update(piece)
        return digest.hexdigest()


def known_digest(file: Path) -> str | None:
    """The hash that the hub's cache gives as the name of a large file's bytes."""
    blob = file.resolve()
    if blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name):
        return blob.name
    return None
