"""What must be known of a verifier before it is loaded. Light: no torch, no transformers."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from speculators_core.config import rope_parameters
from speculators_core.errors import CheckpointError
from speculators_core.model_config import read_model_config
from speculators_core.untrusted import is_here, open_regular

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")


class VerifierFacts(BaseModel):
    """The numbers of a verifier that a draft must agree with. H, n and V in FORMATS' names."""

    model_config = ConfigDict(frozen=True)

    path: str
    architectures: list[str]
    model_type: str
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    tie_word_embeddings: bool
    tokenizer_fingerprint: str | None


def read_verifier(path: str | Path) -> VerifierFacts:
    """Facts from DIR/config.json, nested text configs included.

    Raises `CheckpointError` where the directory is a draft (the two were swapped) or a number is
    missing.
    """
    directory = Path(path)
    if not (is_here(directory) and directory.is_dir()):
        raise CheckpointError(
            "the verifier is not a directory",
            where=str(path),
            hint="give a model directory, or a name that is registered",
        )
    outer = read_model_config(directory)
    if "speculators_model_type" in outer or "draft_vocab_size" in outer:
        raise CheckpointError(
            "this is a draft, not a verifier: its config.json has draft fields",
            where=str(directory / "config.json"),
            hint="are speculator and verifier swapped?",
        )
    inner = outer.get("text_config")
    values = {**outer, **inner} if isinstance(inner, dict) else outer
    heads = _integer(values, "num_attention_heads", directory)
    hidden = _integer(values, "hidden_size", directory)
    return VerifierFacts(
        path=str(directory),
        architectures=outer.get("architectures") or values.get("architectures") or [],
        model_type=str(values.get("model_type", "")),
        hidden_size=hidden,
        num_hidden_layers=_integer(values, "num_hidden_layers", directory),
        vocab_size=_integer(values, "vocab_size", directory),
        intermediate_size=_integer(values, _inner(values), directory),
        num_attention_heads=heads,
        num_key_value_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or hidden // heads,
        rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=_integer(values, "max_position_embeddings", directory),
        rope_parameters=_rope(values),
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        tokenizer_fingerprint=tokenizer_fingerprint(directory),
    )


def has_weights(directory: Path) -> bool:
    """Whether the verifier itself lies here, not only its config."""
    return any(directory.glob("*.safetensors")) or any(directory.glob("pytorch_model*.bin"))


def tokenizer_fingerprint(directory: Path) -> str | None:
    """A hash of the tokenizer's files, equal where the tokens are; None without a tokenizer."""
    digest = hashlib.sha256()
    found = [directory / name for name in _TOKENIZER_FILES if (directory / name).exists()]
    for file in found:
        digest.update(file.name.encode())
        with open_regular(file) as content:
            while piece := content.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest() if found else None


def _inner(values: dict[str, Any]) -> str:
    """The field of the MLP's width; a mixture of experts may have that of one expert alone."""
    fields = ("intermediate_size", "moe_intermediate_size")
    return next((name for name in fields if values.get(name) is not None), fields[0])


def _integer(values: dict[str, Any], field: str, directory: Path) -> int:
    value = values.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(
            f"{field} should be a positive integer, found {value!r}",
            where=f"{directory / 'config.json'}: {field}",
            hint="is this the directory of a causal language model?",
        )
    return value


def _rope(values: dict[str, Any]) -> dict[str, Any]:
    """A config that names no base means 10000, as transformers reads it."""
    return rope_parameters({"rope_theta": 10000.0, **values}) or {}
