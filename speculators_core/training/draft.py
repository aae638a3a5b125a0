"""The draft that training starts from: a new one shaped like one of the verifier's layers, or a
speculator that is trained further (`warm_start`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from speculators_core.config import (
    SPECULATORS_VERSION,
    USUAL_AUX,
    Eagle3Config,
    LayerConfig,
    Proposal,
    Speculators,
    default_aux_layers,
)
from speculators_core.config import Verifier as VerifierReference
from speculators_core.conversion.pairing import written_name
from speculators_core.data.prepare import Prepared
from speculators_core.errors import PairingError
from speculators_core.models.eagle3 import Eagle3Draft
from speculators_core.models.verifier import Verifier
from speculators_core.models.verifier_config import VerifierFacts
from speculators_core.params import NEW_DRAFT, TrainParams
from speculators_core.training import warm_start

_STD = 0.02


def aux_layers(params: TrainParams, facts: VerifierFacts) -> list[int]:
    """Ascending layer ids ("after k layers"). Raises `PairingError` where one is out of range or
    named twice; see `warm_start.read` where there is a speculator to start from."""
    if params.start_from:
        return list(warm_start.read(params, facts).eagle_aux_hidden_state_layer_ids or ())
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


def verifier_name(params: TrainParams, facts: VerifierFacts) -> tuple[str, list[str]]:
    """How the config names the verifier, and warnings where that is a place of this machine."""
    said = None
    if params.start_from:
        said = warm_start.read(params, facts).speculators_config.verifier.name_or_path
    return written_name(facts, params.verifier_name, said)


def draft_config(params: TrainParams, facts: VerifierFacts, draft_vocab_size: int) -> Eagle3Config:
    """The config of the draft: that of the speculator to start from, or a new one with this
    verifier's widths, heads and rotary positions. Verifier, K, precision and whether the embedding
    is trained are this training's in both cases."""
    own = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_version": SPECULATORS_VERSION,
        "embed_requires_grad": params.embedding == "trained",
        "dtype": "bfloat16" if params.dtype == "bfloat16" else "float32",
        "speculators_config": Speculators(
            proposal_methods=[
                Proposal(speculative_tokens=params.speculative_tokens or params.ttt_steps)
            ],
            verifier=VerifierReference(
                name_or_path=verifier_name(params, facts)[0],
                architectures=facts.architectures,
            ),
        ),
    }
    if params.start_from:
        return warm_start.read(params, facts).model_copy(update=own)
    switches = NEW_DRAFT | params.said_of_draft()
    layers, kind = switches.pop("num_layers"), switches.pop("layer_type")
    ids = aux_layers(params, facts)
    counted = {} if len(ids) == USUAL_AUX else {"num_aux_hidden_states": len(ids)}
    return Eagle3Config(
        draft_vocab_size=draft_vocab_size,
        eagle_aux_hidden_state_layer_ids=ids,
        transformer_layer_config=LayerConfig(
            model_type=kind,
            hidden_size=facts.hidden_size,
            intermediate_size=facts.intermediate_size,
            num_hidden_layers=layers,
            num_attention_heads=facts.num_attention_heads,
            num_key_value_heads=facts.num_key_value_heads,
            head_dim=facts.head_dim,
            rms_norm_eps=facts.rms_norm_eps,
            vocab_size=facts.vocab_size,
            max_position_embeddings=facts.max_position_embeddings,
            rope_parameters=facts.rope_parameters,
            **counted,
        ),
        **switches,
        **own,
    )


@torch.no_grad()
def build_draft(params: TrainParams, verifier: Verifier, prepared: Prepared) -> Eagle3Draft:
    """The draft on the verifier's device, in float32, in train mode.

    A new one has the data's vocabulary map; embedding, final norm and, unless switched off, the
    head start as the verifier's, the rest is drawn from N(0, 0.02²), seeded. The embedding is the
    bare table: where a family scales it on its way in (Gemma), the draft's input norm undoes that,
    and vLLM lends a draft the bare table too. One that is trained further has its own weights and
    vocabulary. The embedding is trained, frozen or the verifier's very tensor, as asked.
    """
    draft = Eagle3Draft(draft_config(params, verifier.facts, int(prepared.kept.sum()))).float()
    if params.start_from:
        warm_start.fill(draft, params, verifier, int(prepared.lengths.max()))
    else:
        _fill(draft, params, verifier, prepared)
    draft = draft.to(verifier.device)
    if params.embedding == "shared":
        draft.embed_tokens.weight = nn.Parameter(verifier.embedding.float(), requires_grad=False)
        draft.shares_embedding = True
    return draft


def _fill(draft: Eagle3Draft, params: TrainParams, verifier: Verifier, prepared: Prepared) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(params.seed)
        for module in draft.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=_STD)
    draft.embed_tokens.weight.copy_(verifier.embedding)
    draft.norm.weight.copy_(_norm_scale(verifier))
    if params.lm_head_from_verifier is not False:
        rows = verifier.lm_head[prepared.kept.to(verifier.device)]
        draft.lm_head.weight.copy_(rows * verifier.logit_rule.scale)
    if draft.config.has_vocab_map:
        draft.set_vocab_map(prepared.kept)


def _norm_scale(verifier: Verifier) -> Tensor:
    """What the verifier's final norm multiplies by, [H], whatever its family calls that: a weight,
    1 + weight (Gemma). Told by what it does to vectors of norm 1 and mean 0; a bias cancels out.
    """
    signs = torch.ones_like(verifier.embedding[0])
    signs[1::2] = -1
    above, below = verifier.final_norm(torch.stack([signs, -signs])).float()
    scale: Tensor = (above - below) / 2 * signs
    return scale
