"""The data sets that the lab knows: chats, evaluation prompts, prepared (tokenised) data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from sqlalchemy import select

from app.services.names import place_for
from app.services.views import DataSetView
from app.store.engine import reading, writing
from app.store.models import DataSet
from speculators_core.errors import DataError, InputError, NotFound

Kind = Literal["chats", "prompts", "prepared"]


def list_data_sets(kind: Kind | None = None) -> list[DataSetView]:
    """Newest first."""
    query = select(DataSet).order_by(DataSet.created_at.desc())
    with reading() as session:
        rows = session.scalars(query.where(DataSet.kind == kind) if kind else query)
        return [DataSetView.model_validate(row) for row in rows]


def get(name: str) -> DataSetView:
    """By name or id. Raises `NotFound`."""
    with reading() as session:
        wanted = (DataSet.name == name) | (DataSet.id == name)
        row = session.scalar(select(DataSet).where(wanted).limit(1))
    if row is None:
        raise NotFound(f"there is no data set {name!r}", hint="see the Data page")
    return DataSetView.model_validate(row)


def register(
    path: str | Path,
    name: str,
    kind: Kind,
    *,
    samples: int,
    facts: Mapping[str, Any] | None = None,
    run_id: str | None = None,
) -> DataSetView:
    """Keep a JSONL file or a prepared directory under a name; a taken one gets a number.

    `samples`: chats or prompts in it. Raises `DataError` where nothing lies at the path.
    """
    if kind not in get_args(Kind):
        raise InputError(f"there is no kind of data set {kind!r}", hint=", ".join(get_args(Kind)))
    place = Path(path).resolve()
    if not place.exists():
        raise DataError("there is no such data", where=str(place))
    digest = content_digest(place)
    with writing() as session:
        free, row = place_for(session, DataSet, name, str(place))
        row = row or DataSet(name=free, path=str(place))
        row.kind, row.digest, row.samples = kind, digest, samples
        row.facts, row.run_id = dict(facts or {}), run_id
        session.add(row)
        session.flush()
        return DataSetView.model_validate(row)


def content_digest(place: Path) -> str:
    """SHA-256 of a file, or of a directory's relative names and contents."""
    if place.is_file():
        with place.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    digest = hashlib.sha256()
    for file_path in sorted(path for path in place.rglob("*") if path.is_file()):
        digest.update(f"{file_path.relative_to(place)}\n{content_digest(file_path)}\n".encode())
    return digest.hexdigest()
