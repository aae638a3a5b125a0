"""Files that strangers made, read within bounds. Light: no torch, no numpy.

A checkpoint from somewhere may hold a FIFO that never answers, a link out of its directory, JSON
nested a thousand deep, or a key twice, of which every reader believes another. Whatever reads such
files goes through here.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

from speculators_core.errors import CheckpointError, Forbidden

JSON_BYTES = 16_000_000
JSON_VALUES = 400_000  # twice the index of the largest model; parsed below a second, in 100 MB
_DEPTH = 64
_POINTER = b"version https://git-lfs.github.com/spec/"
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def is_here(name: str | Path) -> bool:
    """Whether a text names something on this disk; not where it can't be a path at all."""
    try:
        return Path(name).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # longer than a name can be, or ~user of nobody
        return False


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read. Raises `CheckpointError` for anything else, without waiting
    for a FIFO, and `FileNotFoundError` where there is nothing.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"{path.name} can't be read: {error.strerror}", where=str(path)
        ) from error
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise CheckpointError(
            f"{path.name} is {_KINDS.get(kind, 'no file')}, expected a regular file",
            where=str(path),
            hint="copy or download the checkpoint again",
        )
    return os.fdopen(descriptor, "rb")


def read_bounded(path: Path, limit: int) -> bytes:
    """All bytes of a regular file of at most `limit` bytes. Raises as `open_regular`."""
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise CheckpointError(
            f"{path.name} is larger than {limit} bytes, which such a file never is",
            where=str(path),
            hint="is it the file that its name says?",
        )
    return content


def is_pointer(path: Path) -> bool:
    """Whether a file is what Git LFS leaves in the place of a large one that was not fetched."""
    with open_regular(path) as file:
        return file.read(len(_POINTER)) == _POINTER


def parse_json(text: bytes) -> Any:
    """The value of a JSON text. Raises `ValueError` that says what is wrong with it: also for a
    key given twice, for nesting below 64 levels and for more than 400,000 values.
    """
    if text.startswith(_POINTER):
        raise ValueError("it is a pointer of Git LFS, not yet the file: git lfs pull fetches it")
    if text.count(b",") + text.count(b"[") + text.count(b"{") > JSON_VALUES:
        raise ValueError(f"it holds more than {JSON_VALUES} values")
    try:
        values = json.loads(text.decode("utf-8"), object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not _shallow(values):
        raise ValueError(f"it is nested more than {_DEPTH} deep")
    if b"\\ud" in text or b"\\uD" in text:
        json.dumps(values, ensure_ascii=False).encode("utf-8")  # half a surrogate pair is no text
    return values


def check_links(directory: Path, roots: Sequence[Path]) -> None:
    """Raise `Forbidden` where an entry of the directory is a link that leads to outside the
    directory and all `roots` (resolved paths), or to something hidden in one of them.

    Whether the directory itself may be read is for whoever named it to say.
    """
    real = Path(os.path.realpath(directory))
    for entry, target in links(real):
        if not any(within(target, root) for root in (real, *roots)):
            raise Forbidden(
                f"{entry.name} is a link to {str(target)!r}, which may not be read from here",
                where=str(entry),
                hint="allowed: " + ", ".join(map(str, roots)),
            )


def links(directory: Path) -> Iterator[tuple[Path, Path]]:
    """The symbolic links in a directory and where they lead, at any depth but below what is
    hidden, where nothing is ever read. None where it is no directory, which reading it will say
    better.
    """
    for place, directories, files in os.walk(directory):
        for name in (*directories, *files):
            path = Path(place, name)
            if path.is_symlink():
                yield path, Path(os.path.realpath(path))
        directories[:] = [name for name in directories if not name.startswith(".")]


def within(real: Path, root: Path) -> bool:
    """Whether a resolved path lies below a root, and not in anything hidden there."""
    if not real.is_relative_to(root):
        return False
    return not any(part.startswith(".") for part in real.relative_to(root).parts)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:80]!r} is given twice")
    return values


def _shallow(values: Any) -> bool:
    level = [values]
    for _ in range(_DEPTH):
        level = [child for value in level for child in _children(value)]
        if not level:
            return True
    return False


def _children(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()
