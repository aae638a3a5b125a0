"""The one exception family of Speclab.

    SpeclabError
    ├── InputError          a value, file or field that can't be right
    │   ├── CheckpointError a checkpoint that can't be read, or is not what it should be
    │   ├── DataError       chats, prompts or prepared data that can't be used
    │   └── PairingError    a verifier and a draft that don't fit each other
    ├── NotFound            nothing of that name or id
    ├── Conflict            the thing exists already, or its state has moved on
    ├── Forbidden           the person may not do that
    ├── Unavailable         a port, process, broker, store or disk that is not there now
    └── Stopped             the work was asked to stop and has saved what it could

A message says what is wrong and what was found and expected; `where` names the file, tensor
or field; `hint` says what to do. `as_dict` is the JSON that the CLI and REST print; `revive` makes
it an error again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class SpeclabError(Exception):
    """Base of all errors that a person is meant to read."""

    kind = "error"

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def as_dict(self) -> dict[str, str | None]:
        return {
            "kind": self.kind,
            "message": self.message,
            "where": self.where,
            "hint": self.hint,
        }

    def __str__(self) -> str:
        parts = [self.message]
        if self.where:
            parts.append(f"({self.where})")
        if self.hint:
            parts.append(f"→ {self.hint}")
        return " ".join(parts)


class InputError(SpeclabError):
    kind = "input"


class CheckpointError(InputError):
    kind = "checkpoint"


class DataError(InputError):
    kind = "data"


class PairingError(InputError):
    kind = "pairing"


class NotFound(SpeclabError):
    kind = "not_found"


class Conflict(SpeclabError):
    kind = "conflict"


class Forbidden(SpeclabError):
    kind = "forbidden"


class Unavailable(SpeclabError):
    kind = "unavailable"


class Stopped(SpeclabError):
    kind = "stopped"


@contextmanager
def about(where: str) -> Iterator[None]:
    """An error of the block that names no place is one of `where`."""
    try:
        yield
    except SpeclabError as error:
        error.where = error.where or where
        raise


def revive(error: Mapping[str, object]) -> SpeclabError:
    """The error that `as_dict` described, in another process or on another machine."""
    classes = {cls.kind: cls for cls in _family(SpeclabError)}
    cls = classes.get(str(error.get("kind")), SpeclabError)
    where, hint = error.get("where"), error.get("hint")
    return cls(
        str(error.get("message")),
        where=None if where is None else str(where),
        hint=None if hint is None else str(hint),
    )


def _family(root: type[SpeclabError]) -> Iterator[type[SpeclabError]]:
    yield root
    for child in root.__subclasses__():
        yield from _family(child)
