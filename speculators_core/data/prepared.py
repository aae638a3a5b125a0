"""What a prepared data set says of itself (`meta.json`). Light: no torch.

    DIR/tokens.safetensors   ids [N] int32, mask [N] bool, lengths [D] int64, validation [D] bool,
                             kept [V] bool (t2d), offsets [dv] int64 (d2t); source [D] int32 and
                             row [D] int64: which row of which source a sample is of
    DIR/texts.json           {id: text} of every token in it
    DIR/meta.json            `PreparedMeta`

A sample can be shown from these alone: neither the verifier nor the data need be there any more.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from speculators_core.errors import Conflict, DataError

CODE_VERSION = 2
"""Part of every key: raised when the same data would become other tokens, masks or files."""
TOKENS, TEXTS, META = "tokens.safetensors", "texts.json", "meta.json"


class SourceFacts(BaseModel):
    """One source: its place, the share of its rows that was wanted, what was taken of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    weight: float
    rows: int  # in the source
    samples: int  # made of them


class PreparedMeta(BaseModel):
    """What a prepared data set was made from, under one key, and what is in it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    code_version: int
    key: str
    verifier: str
    tokenizer_fingerprint: str | None
    template_sha256: str | None  # None: plain text alone, no template was used
    masked_by: str  # how spans of the assistant were found
    enable_thinking: bool | None
    vocab_size: int
    draft_vocab_size: int
    seq_length: int
    samples: int
    validation_samples: int
    tokens: int
    masked_tokens: int  # true in the mask: written by the assistant
    coverage: float
    lengths: list[tuple[int, int]]  # (upper bound in tokens, samples)
    skipped: dict[str, int]
    doubts: dict[str, int]
    sources: list[SourceFacts]


def meta_at(directory: Path) -> PreparedMeta | None:
    """The meta of a prepared data set there; None where nothing is. Raises `Conflict` where the
    directory is something else, also one of an earlier version.
    """
    if not directory.exists():
        return None
    try:
        values = json.loads((directory / META).read_text(encoding="utf-8"))
        return PreparedMeta.model_validate(values)
    except (OSError, ValueError, ValidationError):
        raise Conflict(
            "the place is taken by something that is not a prepared data set of this version",
            where=str(directory),
            hint="choose another directory, or remove this one",
        ) from None


def read_meta(directory: str | Path) -> PreparedMeta:
    """The meta of a prepared data set. Raises `DataError` where there is none."""
    try:
        meta = meta_at(Path(directory))
    except Conflict:
        meta = None
    if meta is None:
        raise DataError(
            "this is not a prepared data set",
            where=str(directory),
            hint="make one: speclab prepare DATA --verifier V --output DIR",
        )
    return meta
