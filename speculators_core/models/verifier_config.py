"""What must be known of a verifier before it is loaded. Light: no torch, no transformers."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from speculators_core.config import rope_parameters
from speculators_core.errors import CheckpointError
from speculators_core.model_config import positive, read_model_config
from speculators_core.untrusted import is_here, open_regular

_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": {"tie_word_embeddings": True, "head_dim": 256},
    "gemma2": {"tie_word_embeddings": True, "head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
}
"""What config.json may leave out because transformers fills it in, where that differs from what
all others mean by leaving it out (Google's Gemma 3 leaves out most)."""

_NOT_LLAMA = frozenset({"partial_rotary_factor", "mrope_section", "mrope_interleaved"})
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
    quantization: str | None
    """How the weights are quantised, by the name that its tool gives it."""
    sliding_window: int | None
    """Tokens that sliding layers look back, where there are such layers."""
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
    values = {**outer, **(outer.get("text_config") or {})}
    family = str(values.get("model_type", ""))
    values = {**_DEFAULTS.get(family, {}), **values}
    heads = _size(values, "num_attention_heads", directory)
    hidden = _size(values, "hidden_size", directory)
    return VerifierFacts(
        path=str(directory),
        architectures=outer.get("architectures") or values.get("architectures") or [],
        model_type=family,
        hidden_size=hidden,
        num_hidden_layers=_size(values, "num_hidden_layers", directory),
        vocab_size=_size(values, "vocab_size", directory),
        intermediate_size=_size(values, _inner(values), directory),
        num_attention_heads=heads,
        num_key_value_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or hidden // heads,
        rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=_size(values, "max_position_embeddings", directory),
        rope_parameters=_rope(values),
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        quantization=_quantization(values),
        sliding_window=_sliding_window(values),
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


def _quantization(values: dict[str, Any]) -> str | None:
    block = values.get("quantization_config")
    if not isinstance(block, dict):
        return None
    return str(block.get("quant_method") or "an unnamed method")


def _sliding_window(values: dict[str, Any]) -> int | None:
    """None where no layer slides: Qwen 2 names a window and does not use it."""
    window = values.get("sliding_window")
    kinds = values.get("layer_types")
    unused = values.get("use_sliding_window") is False
    if isinstance(kinds, list) and "sliding_attention" not in kinds:
        unused = True
    return window if isinstance(window, int) and not unused else None


def _size(values: dict[str, Any], field: str, directory: Path) -> int:
    return positive(values, field, directory, "is this the directory of a causal language model?")


def _inner(values: dict[str, Any]) -> str:
    """The field of the MLP's width; a mixture of experts may have that of one expert alone."""
    fields = ("intermediate_size", "moe_intermediate_size")
    return next((name for name in fields if values.get(name) is not None), fields[0])


def _rope(values: dict[str, Any]) -> dict[str, Any]:
    """A config that names no base means 10000, as transformers reads it. Of a family with two
    kinds of layers (Gemma 3) the positions of those that see everything; what a Llama's layer, as
    a draft has, does not know is left out."""
    given = values.get("rope_parameters")
    if isinstance(given, dict) and isinstance(given.get("full_attention"), dict):
        values = {**values, "rope_parameters": given["full_attention"]}
    found = rope_parameters({"rope_theta": 10000.0, **values}) or {}
    known = {name: value for name, value in found.items() if name not in _NOT_LLAMA}
    return {"rope_theta": float(values.get("rope_theta") or 10000.0), **known}
