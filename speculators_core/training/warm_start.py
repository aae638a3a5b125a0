"""A speculator that is trained further: an earlier one of ours, or a converted one.

What it is stays: layers, widths, norms, rotary positions, aux layers and its draft vocabulary, for
each row of its head belongs to one token. An option that says otherwise is an error.
"""

from __future__ import annotations

from pathlib import Path

import torch

from speculators_core.checkpoint import load_speculator
from speculators_core.config import Eagle3Config
from speculators_core.conversion.aux_layers import IDS
from speculators_core.conversion.digest import Digests
from speculators_core.conversion.exported import window_of
from speculators_core.conversion.pairing import check_pairing
from speculators_core.data.prepare import Prepared
from speculators_core.errors import CheckpointError, InputError, PairingError
from speculators_core.models.eagle3 import Eagle3Draft
from speculators_core.models.verifier import Verifier
from speculators_core.models.verifier_config import VerifierFacts
from speculators_core.params import TrainParams
from speculators_core.weights import weight_files


def read(params: TrainParams, facts: VerifierFacts) -> Eagle3Config:
    """The config of `params.start_from`, its aux layers named.

    Raises `CheckpointError` where it is no EAGLE-3 speculator or does not say its aux layers,
    `InputError` where an option contradicts it, `PairingError` where the verifier does not fit.
    """
    directory = Path(str(params.start_from))
    config = Eagle3Config.load(directory)
    asked = sorted(params.aux_layers) if params.aux_layers else None
    _check_options(params, config, asked)
    ids = config.eagle_aux_hidden_state_layer_ids or asked
    if ids is None or len(ids) != config.num_aux:
        raise CheckpointError(
            "the speculator to start from does not say which verifier states it was trained on; "
            f"aux_layers should name {config.num_aux}, found {asked or 'none'}",
            where=f"{directory / 'config.json'}: {IDS}",
            hint="name them: --aux-layers, counted after k layers",
        )
    config = config.model_copy(update={IDS: ids})
    check_pairing(config, facts)
    return config


def fingerprint(directory: str) -> dict[str, str]:
    """Hashes of the speculator's files, by name."""
    place = Path(directory)
    return Digests([place / "config.json", *weight_files(place)]).wait()


def covered(draft: Eagle3Draft, prepared: Prepared) -> float:
    """The share of the answers' tokens that the draft can propose."""
    trained = prepared.ids[prepared.mask].long()
    return float(draft.kept.cpu()[trained].float().mean())


def describe(draft: Eagle3Draft, prepared: Prepared) -> str:
    """What of the data the speculator's own vocabulary covers, in a sentence."""
    return (
        f"trained further from a speculator: its draft vocabulary of "
        f"{draft.config.draft_vocab_size} tokens covers {covered(draft, prepared):.1%} of the "
        "answers' tokens"
    )


@torch.no_grad()
def fill(draft: Eagle3Draft, params: TrainParams, verifier: Verifier, longest: int) -> None:
    """Copy the weights of `params.start_from` into a draft of its shape, the vocabulary in
    ascending order. `longest` is the longest chat, in tokens.

    Raises `CheckpointError` where a tensor is missing, wrong or not finite, `InputError` where the
    embedding can't be shared or the draft would have to look back further than it ever does.
    """
    directory = Path(str(params.start_from))
    table = verifier.embedding
    fits = table.shape == draft.embed_tokens.weight.shape
    earlier = load_speculator(directory, embedding=table if fits else None)
    _check_window(draft.config, longest, directory)
    if params.embedding == "shared" and not earlier.shares_embedding:
        own = earlier.embed_tokens.weight
        if not fits or not torch.equal(own, table.to(own)):
            raise InputError(
                "the speculator to start from has an embedding of its own, which differs from the "
                "verifier's: sharing that one would change the draft",
                where="embedding",
                hint="embedding: frozen keeps its own, trained trains it",
            )
    draft.load_state_dict(earlier.state_dict())
    if draft.config.has_vocab_map:
        ids = earlier.to_verifier_ids(torch.arange(draft.config.draft_vocab_size))
        draft.lm_head.weight.copy_(earlier.lm_head.weight[ids.argsort()])
        draft.set_vocab_map(earlier.kept)


def _check_options(params: TrainParams, config: Eagle3Config, aux: list[int] | None) -> None:
    layers = config.transformer_layer_config
    kept: dict[str, object] = {
        "num_layers": layers.num_hidden_layers,
        "layer_type": layers.model_type,
    }
    asked = params.said_of_draft()
    kept |= {name: getattr(config, name) for name in asked.keys() - kept.keys()}
    if aux and config.eagle_aux_hidden_state_layer_ids:
        kept["aux_layers"], asked["aux_layers"] = config.eagle_aux_hidden_state_layer_ids, aux
    for name, value in asked.items():
        if value != kept[name]:
            raise InputError(
                f"{name} is {value}, the speculator to start from has {kept[name]}",
                where=name,
                hint="leave it empty, or start from another speculator",
            )


def _check_window(config: Eagle3Config, longest: int, directory: Path) -> None:
    """Training lets a draft see all of a chat."""
    window = window_of(config).get("sliding_window")
    if isinstance(window, int) and longest > window:
        raise PairingError(
            f"the speculator to start from looks back over {window} tokens, the longest chat has "
            f"{longest}: training would let it see all of them",
            where=f"{directory / 'config.json'}: sliding_window",
            hint=f"prepare the chats with --seq-length {window}",
        )
