"""The verifiers that the lab knows by name."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import select

from app.services.names import place_for
from app.services.views import VerifierView
from app.store.engine import reading, writing
from app.store.models import VerifierModel
from speculators_core.errors import NotFound
from speculators_core.models.verifier_config import read_verifier


def list_verifiers() -> list[VerifierView]:
    """Newest first."""
    with reading() as session:
        rows = session.scalars(select(VerifierModel).order_by(VerifierModel.created_at.desc()))
        return [VerifierView.model_validate(row) for row in rows]


def get(name: str) -> VerifierView:
    """By name or id. Raises `NotFound`."""
    with reading() as session:
        wanted = (VerifierModel.name == name) | (VerifierModel.id == name)
        row = session.scalar(select(VerifierModel).where(wanted).limit(1))
    if row is None:
        raise NotFound(f"there is no verifier {name!r}", hint="register it on the Models page")
    return VerifierView.model_validate(row)


def register(
    path: str | Path, name: str, *, source: str | None = None, run_id: str | None = None
) -> VerifierView:
    """Read DIR/config.json and keep its facts; a name that is taken gets a number.

    `source`: where the directory came from (default: the path). Raises `CheckpointError`.
    """
    facts = read_verifier(path)
    directory = str(Path(path).resolve())
    values = {
        "source": source or directory,
        "architecture": (facts.architectures or [facts.model_type])[0],
        "hidden_size": facts.hidden_size,
        "num_layers": facts.num_hidden_layers,
        "vocab_size": facts.vocab_size,
        "tokenizer_fingerprint": facts.tokenizer_fingerprint or "",
        "run_id": run_id,
    }
    with writing() as session:
        free, row = place_for(session, VerifierModel, name, directory)
        row = row or VerifierModel(name=free, path=directory)
        for field, value in values.items():
            setattr(row, field, value)
        session.add(row)
        session.flush()
        return VerifierView.model_validate(row)
