"""Unique names for registered things: a taken one gets a number."""

from __future__ import annotations

from typing import TypeVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.store.engine import serialise
from app.store.models import DataSet, Speculator, VerifierModel
from speculators_core.errors import InputError
from speculators_core.params import NAME, NAME_RULE

Registered = TypeVar("Registered", VerifierModel, DataSet, Speculator)


def checked(name: str) -> str:
    """The name, if it can be one: it is used in references, folders and URLs."""
    if not NAME.fullmatch(name):
        raise InputError(f"{name!r} can't be a name", hint=NAME_RULE)
    return name


def place_for(
    session: Session, table: type[Registered], name: str, path: str
) -> tuple[str, Registered | None]:
    """A free name like `name`, and the row that already stands for this path under such a name.

    Registering the same directory again (a job that was resumed) updates its row.
    """
    checked(name)
    serialise(session, f"names of {table.__tablename__}")
    stem = table.name.startswith(name, autoescape=True)
    rows = {row.name: row for row in session.scalars(select(table).where(stem))}
    candidate, number = name, 1
    while candidate in rows:
        if rows[candidate].path == path:
            return candidate, rows[candidate]
        number += 1
        candidate = f"{name}-{number}"
    return candidate, None
