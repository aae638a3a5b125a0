"""Output directories: complete or absent.

A directory is written beside its place under a hidden name and renamed into it, so one that
exists is complete.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from speculators_core.errors import Conflict, Unavailable

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})


@contextmanager
def complete_or_absent(directory: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A fresh directory to write into; it becomes `directory` only when the block ends well.

    Folders that are made for it go again with it. Raises `Conflict` where it is there already,
    `Unavailable` where the disk takes no more.
    """
    if os.path.lexists(directory) and not overwrite:
        raise Conflict(
            "the output exists already",
            where=str(directory),
            hint="choose another output, or remove this one",
        )
    token = uuid.uuid4().hex[:8]
    draft = directory.parent / f".{directory.name}.{token}.partial"
    old = directory.parent / f".{directory.name}.{token}.old"
    new = [place for place in directory.parents if not os.path.lexists(place)]
    try:
        with room_for(directory, hint="nothing was left behind"):
            make_place(draft, directory)
            yield draft
            if overwrite and directory.exists():
                directory.rename(old)
            try:
                draft.rename(directory)
            except OSError as error:
                raise Conflict(
                    f"the output appeared while it was being written: {error.strerror}",
                    where=str(directory),
                    hint="two jobs write to one place: choose another output",
                ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
        with suppress(OSError):  # the output is there, or what somebody else put beside it
            for place in new:
                place.rmdir()


@contextmanager
def room_for(output: Path, hint: str) -> Iterator[None]:
    """A disk that takes no more is `Unavailable`, for the output that was being made."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise Unavailable(
            f"the output can't be written: {error.strerror}",
            where=str(output),
            hint=f"make room, or choose a place on another disk; {hint}",
        ) from error


def make_place(place: Path, output: Path, *, exist_ok: bool = False) -> None:
    """Make a directory that `output` needs, and those above it. Raises `Unavailable`."""
    try:
        place.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        raise Unavailable(
            f"the output can't be written: {error.strerror}",
            where=str(output),
            hint="choose a place that you may write to",
        ) from error
