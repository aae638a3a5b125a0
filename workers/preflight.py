"""What is looked at before a server starts: vLLM would serve many broken pairings without a word.

Raises the error that a person reads; returns what the launch needs to know.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import psutil

from speculators_core.config import Eagle3Config
from speculators_core.errors import CheckpointError, PairingError, Unavailable
from speculators_core.models.verifier_config import VerifierFacts, read_verifier
from speculators_core.params import DeployParams

NGRAM_TOKENS = 3  # K of the n-gram drafter, which has no config to say it
_VLLM_AUX = 3  # vLLM's Llama draft counts no other number of aux states
_PROCESS_BYTES = 2 * 2**30  # interpreter, libraries and activations of a server
_MOST_KV_BYTES = 4 * 2**30  # beyond one full request, on a CPU


@dataclass(frozen=True)
class Examined:
    """Inputs that fit each other."""

    verifier: VerifierFacts
    speculator: Eagle3Config | None
    speculative_tokens: int
    kv_cache_bytes: int
    notes: tuple[str, ...]


def examine(params: DeployParams) -> Examined:
    """Check files, pairing and memory of a deployment whose names are resolved to directories."""
    verifier = read_verifier(params.verifier)
    weights = _weights(Path(params.verifier), "verifier")
    _context(params, verifier)
    notes: list[str] = []
    speculator = None
    if params.speculator:
        speculator = Eagle3Config.load(Path(params.speculator))
        weights += _weights(Path(params.speculator), "speculator")
        fits(speculator, verifier, params.speculator)
        _sound(Path(params.speculator), speculator)
    tokens = params.speculative_tokens or (
        speculator.speculative_tokens if speculator else NGRAM_TOKENS
    )
    if speculator and tokens > speculator.speculative_tokens:
        notes.append(
            f"K = {tokens}, but the speculator proposes {speculator.speculative_tokens}: "
            "later positions were never trained"
        )
    kv_cache = kv_cache_bytes(params, verifier)
    _memory(weights, kv_cache)
    return Examined(verifier, speculator, tokens, kv_cache, tuple(notes))


def fits(speculator: Eagle3Config, verifier: VerifierFacts, where: str) -> None:
    """Raise `PairingError` unless the draft was made for a verifier of these numbers."""
    pairs = (
        ("vocabulary", speculator.vocab_size, verifier.vocab_size),
        ("hidden size", speculator.verifier_hidden_size, verifier.hidden_size),
    )
    for what, expected, found in pairs:
        if expected != found:
            raise PairingError(
                f"the speculator was made for a verifier of {what} {expected}, "
                f"this one's is {found}",
                where=where,
                hint="choose the verifier that it was trained for",
            )
    ids = speculator.eagle_aux_hidden_state_layer_ids
    if ids is None:
        raise PairingError(
            "the speculator does not say which verifier states it was trained on",
            where=f"{where}/config.json: eagle_aux_hidden_state_layer_ids",
            hint="convert it again with --aux-layers",
        )
    if ids[0] < 0 or ids[-1] > verifier.num_hidden_layers:
        raise PairingError(
            f"aux layer ids {ids} are not all within 0..{verifier.num_hidden_layers}",
            where=f"{where}/config.json: eagle_aux_hidden_state_layer_ids",
            hint="choose the verifier that it was trained for",
        )
    if len(ids) != _VLLM_AUX:
        raise PairingError(
            f"the speculator reads {len(ids)} verifier states; servers support {_VLLM_AUX}",
            where=f"{where}/config.json: eagle_aux_hidden_state_layer_ids",
        )


def kv_cache_bytes(params: DeployParams, verifier: VerifierFacts) -> int:
    """Room in float32 for all requests at their longest, or for one of them and 4 GiB."""
    token = 2 * verifier.num_hidden_layers * verifier.num_key_value_heads * verifier.head_dim * 4
    token += token // verifier.num_hidden_layers * 3  # up to three draft layers
    request = (params.max_model_len + 256) * token
    return min(request * params.max_num_seqs, request + _MOST_KV_BYTES)


def _weights(directory: Path, what: str) -> int:
    """Bytes of the weight files."""
    files = [*directory.glob("*.safetensors"), *directory.glob("*.bin")]
    if not files:
        raise CheckpointError(
            f"the {what} has no weight files",
            where=str(directory),
            hint="is the directory complete? expected *.safetensors",
        )
    return sum(file.stat().st_size for file in files)


def _context(params: DeployParams, verifier: VerifierFacts) -> None:
    if params.max_model_len > verifier.max_position_embeddings:
        raise PairingError(
            f"max_model_len {params.max_model_len} is longer than the verifier's "
            f"{verifier.max_position_embeddings} positions",
            where="max_model_len",
            hint=f"choose at most {verifier.max_position_embeddings}",
        )


def _sound(directory: Path, config: Eagle3Config) -> None:
    """Names, shapes, finiteness and vocabulary map of every tensor."""
    import torch

    from speculators_core.checkpoint import load_speculator

    # a file may leave the embedding to the verifier; its values are not looked at here
    shared = torch.zeros(1, 1).expand(config.vocab_size, config.hidden_size)
    load_speculator(directory, embedding=shared)


def _memory(weights: int, kv_cache: int) -> None:
    """On a CPU the server shares the machine's memory; a GPU's is vLLM's own affair."""
    needed = weights + kv_cache + _PROCESS_BYTES
    available = psutil.virtual_memory().available
    if needed > available:
        raise Unavailable(
            f"the server needs about {_gib(needed)} GiB of memory, {_gib(available)} are free",
            hint="stop another deployment, or lower max_model_len or max_num_seqs",
        )


def _gib(size: int) -> str:
    return f"{math.ceil(10 * size / 2**30) / 10:.1f}"
