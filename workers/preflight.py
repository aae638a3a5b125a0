"""What is looked at before a server starts: vLLM would serve many broken pairings without a word.

Raises the error that a person reads; returns what the launch needs to know.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import psutil

from app.services.verdict import verdict_of
from speculators_core.config import USUAL_AUX, Eagle3Config
from speculators_core.conversion.pairing import tokenizer_warnings
from speculators_core.conversion.source import open_source
from speculators_core.errors import CheckpointError, InputError, PairingError, Unavailable
from speculators_core.model_config import read_model_config
from speculators_core.models.dflash_config import DFlashConfig
from speculators_core.models.draft_config import Draft, read_draft_config
from speculators_core.models.mtp_config import MTPConfig
from speculators_core.models.verifier_config import VerifierFacts, read_verifier
from speculators_core.params import DeployParams
from speculators_core.precision import all_finite
from speculators_core.weights import check_fetched, check_shapes, not_finite

NGRAM_TOKENS = 3  # K of the n-gram drafter, which has no config to say it
MTP_TOKENS = 3  # K of an MTP head inside its verifier, whose config does not say it either
_REFERENCE = ("ngram", "eagle3")  # what the reference engine drafts with
_LENT = frozenset({"embed_tokens.weight", "lm_head.weight"})  # by the verifier, where not stored
PROCESS_BYTES = 2 * 2**30  # interpreter, libraries and activations of a server
_MOST_KV_BYTES = 4 * 2**30  # beyond one full request, on a CPU


@dataclass(frozen=True)
class Examined:
    """Inputs that fit each other. `method` is what vLLM calls the way of drafting."""

    verifier: VerifierFacts
    method: str
    speculative_tokens: int
    kv_cache_bytes: int
    notes: tuple[str, ...]


def examine(params: DeployParams) -> Examined:
    """Check files, pairing and memory of a deployment whose names are resolved to directories."""
    verifier = read_verifier(params.verifier)
    weights = weight_bytes(Path(params.verifier), "verifier")
    _context(params, verifier)
    method, proposed = "ngram", NGRAM_TOKENS
    if params.speculator and is_own_head(params):
        method, proposed = "mtp", MTP_TOKENS
    elif params.speculator:
        speculator = read_draft_config(Path(params.speculator))
        weights += weight_bytes(Path(params.speculator), "speculator")
        fits(speculator, verifier, params.speculator)
        _vllm_knows(params, speculator)
        _sound(Path(params.speculator), speculator)
        method, proposed = speculator.algorithm, speculator.speculative_tokens
    _engine(params, method)
    tokens = params.speculative_tokens or proposed
    notes = _left_open(params) + _may_overflow(params)
    if params.speculator:
        notes += tokenizer_warnings(Path(params.speculator), verifier)
    if method not in ("ngram", "mtp") and tokens > proposed:
        notes.append(
            f"K = {tokens}, but the speculator proposes {proposed}: "
            "later positions were never trained"
        )
    kv_cache = kv_cache_bytes(params, verifier)
    _memory(weights, kv_cache)
    return Examined(verifier, method, tokens, kv_cache, tuple(notes))


def _left_open(params: DeployParams) -> list[str]:
    """What the conversion of the speculator left, which somebody has decided to serve."""
    verdict = verdict_of(Path(params.speculator)) if params.speculator else None
    return [f"its conversion left: {what}" for what in (verdict.obstacles if verdict else ())]


def _may_overflow(params: DeployParams) -> list[str]:
    config = read_model_config(Path(params.verifier))
    made = config.get("dtype") or config.get("torch_dtype") or "another format"
    if params.dtype != "float16" or made == "float16":
        return []
    return [
        f"float16 ends at 65504, and the verifier was made in {made}: activations beyond become "
        "infinite, and answers nonsense; bfloat16 and float32 are safe"
    ]


def is_own_head(params: DeployParams) -> bool:
    """Whether the verifier is to draft with the MTP head among its own weights: it is named as the
    speculator too. Raises `CheckpointError` where it has none.
    """
    if Path(str(params.speculator)).resolve() != Path(params.verifier).resolve():
        return False
    if not any(name.startswith("mtp.") for name in open_source(params.verifier).tensors):
        raise CheckpointError(
            "verifier and speculator are the same model, and it has no MTP head (no mtp.* tensors)",
            where=params.verifier,
            hint="choose a speculator, or leave it empty for the n-gram drafter",
        )
    return True


def _engine(params: DeployParams, method: str) -> None:
    if params.engine == "reference" and method not in _REFERENCE:
        raise InputError(
            f"the reference engine drafts with EAGLE-3 and n-grams, this speculator with {method}",
            where="engine",
            hint="deploy it with vLLM",
        )


def _vllm_knows(params: DeployParams, speculator: Draft) -> None:
    """Raise `InputError` where vLLM would not load this draft and the reference engine does."""
    why = speculator.vllm_obstacle if isinstance(speculator, Eagle3Config) else None
    if why and params.engine == "vllm":
        raise InputError(why, where="engine", hint="deploy it with the reference engine")


def fits(speculator: Draft, verifier: VerifierFacts, where: str) -> None:
    """Raise `PairingError` unless the draft was made for a verifier of these numbers, and is served
    as a model of its own.
    """
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
    if isinstance(speculator, MTPConfig):
        raise PairingError(
            "an MTP head is served inside its verifier, not beside it",
            where=where,
            hint="speclab stitch-mtp SPECULATOR --verifier V --output DIR, then deploy DIR as "
            "verifier and as speculator",
        )
    if isinstance(speculator, Eagle3Config):
        _eagle3_fits(speculator, verifier, where)
    elif isinstance(speculator, DFlashConfig):
        _dflash_fits(speculator, verifier, where)


def _eagle3_fits(speculator: Eagle3Config, verifier: VerifierFacts, where: str) -> None:
    field = f"{where}/config.json: eagle_aux_hidden_state_layer_ids"
    ids = speculator.eagle_aux_hidden_state_layer_ids
    if ids is None:
        raise PairingError(
            "the speculator does not say which verifier states it was trained on",
            where=field,
            hint="convert it again with --aux-layers",
        )
    _within(ids, verifier, field)
    counted = speculator.transformer_layer_config.model_extra or {}
    if len(ids) != (said := counted.get("num_aux_hidden_states", USUAL_AUX)):
        raise PairingError(
            f"the speculator reads {len(ids)} verifier states, vLLM would count {said}",
            where=f"{where}/config.json: transformer_layer_config.num_aux_hidden_states",
            hint="convert it again: the number is then written where vLLM looks",
        )


def _dflash_fits(speculator: DFlashConfig, verifier: VerifierFacts, where: str) -> None:
    _within(
        speculator.aux_hidden_state_layer_ids,
        verifier,
        f"{where}/config.json: aux_hidden_state_layer_ids",
    )
    if speculator.mixes_attention:
        raise PairingError(
            "the speculator mixes sliding and full attention; vLLM 0.32 takes the layers of such a "
            "file to be causal all, so it would accept next to nothing",
            where=f"{where}/config.json: layer_types",
            hint="serve the checkpoint that it was converted from with vLLM itself",
        )


def _within(ids: list[int], verifier: VerifierFacts, field: str) -> None:
    if ids[0] < 0 or ids[-1] > verifier.num_hidden_layers:
        raise PairingError(
            f"aux layer ids {ids} are not all within 0..{verifier.num_hidden_layers}",
            where=field,
            hint="choose the verifier that it was trained for",
        )


def kv_cache_bytes(params: DeployParams, verifier: VerifierFacts) -> int:
    """Room in float32 for all requests at their longest, or for one of them and 4 GiB."""
    token = 2 * verifier.num_hidden_layers * verifier.num_key_value_heads * verifier.head_dim * 4
    token += token // verifier.num_hidden_layers * 3  # up to three draft layers
    request = (params.max_model_len + 256) * token
    return min(request * params.max_num_seqs, request + _MOST_KV_BYTES)


def weight_bytes(directory: Path, what: str) -> int:
    """Bytes of the weight files."""
    files = [*directory.glob("*.safetensors"), *directory.glob("*.bin")]
    if not files:
        raise CheckpointError(
            f"the {what} has no weight files",
            where=str(directory),
            hint="is the directory complete? expected *.safetensors",
        )
    check_fetched(files)
    return sum(file.stat().st_size for file in files)


def _context(params: DeployParams, verifier: VerifierFacts) -> None:
    if params.max_model_len > verifier.max_position_embeddings:
        raise PairingError(
            f"max_model_len {params.max_model_len} is longer than the verifier's "
            f"{verifier.max_position_embeddings} positions",
            where="max_model_len",
            hint=f"choose at most {verifier.max_position_embeddings}",
        )


def _sound(directory: Path, config: Draft) -> None:
    """Names, shapes and finiteness of every tensor; of an EAGLE-3 draft the vocabulary map too."""
    if isinstance(config, Eagle3Config):
        import torch

        from speculators_core.checkpoint import load_speculator

        # a file may leave the embedding to the verifier; its values are not looked at here
        shared = torch.zeros(1, 1).expand(config.vocab_size, config.hidden_size)
        load_speculator(directory, embedding=shared)
        return
    source = open_source(directory)
    found = {name: info.shape for name, info in source.tensors.items()}
    check_shapes(found, config.tensor_shapes(), directory, _LENT)
    for name, info in source.tensors.items():
        if not all(all_finite(piece, info.dtype) for piece in source.pieces(name)):
            raise not_finite(name, directory)


def _memory(weights: int, kv_cache: int) -> None:
    """On a CPU the server shares the machine's memory; a GPU's is vLLM's own affair."""
    needed = weights + kv_cache + PROCESS_BYTES
    available = psutil.virtual_memory().available
    if needed > available:
        raise Unavailable(
            f"the server needs about {gib(needed)} GiB of memory, {gib(available)} are free",
            hint="stop another deployment, or lower max_model_len or max_num_seqs",
        )


def gib(size: int) -> str:
    return f"{math.ceil(10 * size / 2**30) / 10:.1f}"
