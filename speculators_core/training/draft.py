"""The draft that training starts from: shaped like one of the verifier's layers."""

from __future__ import annotations

import torch
from torch import nn

from speculators_core.config import (
    USUAL_AUX,
    Eagle3Config,
    LayerConfig,
    Proposal,
    Speculators,
    default_aux_layers,
)
from speculators_core.config import Verifier as VerifierReference
from speculators_core.data.prepare import Prepared
from speculators_core.errors import PairingError
from speculators_core.models.eagle3 import Eagle3Draft
from speculators_core.models.verifier import Verifier
from speculators_core.models.verifier_config import VerifierFacts
from speculators_core.params import TrainParams

_STD = 0.02


def aux_layers(params: TrainParams, facts: VerifierFacts) -> list[int]:
    """Ascending layer ids ("after k layers"). Raises `PairingError` where one is out of range or
    named twice."""
    ids = params.aux_layers or default_aux_layers(facts.num_hidden_layers)
    wrong = [k for k in ids if k > facts.num_hidden_layers]
    if wrong or len(set(ids)) != len(ids):
        raise PairingError(
            f"the aux layers {list(ids)} should be different and at most "
            f"{facts.num_hidden_layers}, the verifier's number of layers",
            where="aux_layers",
            hint="leave it empty for 2, n/2, n-3",
        )
    return sorted(ids)


def draft_config(params: TrainParams, facts: VerifierFacts, draft_vocab_size: int) -> Eagle3Config:
    """The config of a draft for this verifier: its widths, heads and rotary positions."""
    ids = aux_layers(params, facts)
    counted = {} if len(ids) == USUAL_AUX else {"num_aux_hidden_states": len(ids)}
    return Eagle3Config(
        draft_vocab_size=draft_vocab_size,
        norm_before_residual=params.norm_before_residual,
        norm_before_fc=params.norm_before_fc,
        fc_norm=params.fc_norm,
        norm_output=params.norm_output,
        eagle_aux_hidden_state_layer_ids=ids,
        dtype="bfloat16" if params.dtype == "bfloat16" else "float32",
        speculators_config=Speculators(
            proposal_methods=[
                Proposal(speculative_tokens=params.speculative_tokens or params.ttt_steps)
            ],
            verifier=VerifierReference(name_or_path=facts.path, architectures=facts.architectures),
        ),
        transformer_layer_config=LayerConfig(
            hidden_size=facts.hidden_size,
            intermediate_size=facts.intermediate_size,
            num_hidden_layers=params.num_layers,
            num_attention_heads=facts.num_attention_heads,
            num_key_value_heads=facts.num_key_value_heads,
            head_dim=facts.head_dim,
            rms_norm_eps=facts.rms_norm_eps,
            vocab_size=facts.vocab_size,
            max_position_embeddings=facts.max_position_embeddings,
            rope_parameters=facts.rope_parameters,
            **counted,
        ),
    )


@torch.no_grad()
def build_draft(params: TrainParams, verifier: Verifier, prepared: Prepared) -> Eagle3Draft:
    """A fresh draft with the data's vocabulary map.

    Embedding (frozen), final norm and, unless switched off, the head start as the verifier's; the
    rest is drawn from N(0, 0.02²), seeded.
    """
    config = draft_config(params, verifier.facts, int(prepared.kept.sum()))
    with torch.random.fork_rng():
        torch.manual_seed(params.seed)
        draft = Eagle3Draft(config).float()
        for module in draft.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=_STD)
    draft.embed_tokens.weight.copy_(verifier.embedding)
    draft.norm.weight.copy_(verifier.final_norm.weight)
    if params.lm_head_from_verifier:
        draft.lm_head.weight.copy_(verifier.lm_head[prepared.kept.to(verifier.device)])
    if config.has_vocab_map:
        draft.set_vocab_map(prepared.kept)
    return draft.to(verifier.device)
