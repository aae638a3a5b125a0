"""How much of what its verifier says a draft can propose: the ceiling of its acceptance.

Light: no torch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from speculators_core.config import read_json
from speculators_core.conversion.source import open_source
from speculators_core.conversion.target import REPORT, TRAINING_REPORT
from speculators_core.data.samples import read_facts, trained_counts
from speculators_core.errors import PairingError

_MAP = 8_000_000  # tokens; thirty times the largest vocabulary of today


class Coverage(BaseModel):
    """The share, in 0..1, of tokens that are in the draft's vocabulary, and of which tokens."""

    model_config = ConfigDict(frozen=True)

    share: float = Field(ge=0.0, le=1.0)
    of: str

    def __str__(self) -> str:
        return f"{self.share:.2%} of {self.of}"


def known_coverage(directory: Path) -> Coverage | None:
    """What the reports beside a draft say of it. Raises `CheckpointError` where one is damaged."""
    for name in (TRAINING_REPORT, REPORT):
        if (directory / name).is_file():
            try:
                return Coverage.model_validate(read_json(directory / name).get("coverage"))
            except ValidationError:  # of a tool that says nothing of it
                continue
    return None


def check_data(data: str | Path, vocab_size: int) -> None:
    """Raise `DataError` where there is no prepared data set, `PairingError` where it is of another
    vocabulary.
    """
    facts = read_facts(data)
    if facts.vocab_size != vocab_size:
        raise PairingError(
            f"the data was prepared for a vocabulary of {facts.vocab_size} tokens, the draft's "
            f"verifier has {vocab_size}",
            where=str(data),
            hint="prepare it with the verifier that the draft works for",
        )


def coverage_on(draft: Path, data: str | Path) -> Coverage:
    """Measured on the answers in a prepared data set that `check_data` has passed. `draft` is in
    speculators format.
    """
    counts, source = trained_counts(data), open_source(draft)
    kept = np.ones(len(counts), np.bool_)
    if "t2d" in source.tensors:
        kept = source.values("t2d", _MAP) != 0
    share = float(counts[kept].sum() / max(counts.sum(), 1))
    return Coverage(share=share, of=f"{counts.sum()} answer tokens in {Path(data).name}")
