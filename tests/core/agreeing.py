"""A verifier and a draft that agree often, made by hand instead of trained.

The verifier's layers are weakened to a `share` of their effect, so its next token is mostly a
function of the newest one: argmax lm_head(norm(E[x])). The draft computes just that: its state is
normed to zero, each query sees its own token only, values carry the normed embedding through, and
norm and head are the verifier's. The less the share, the more they agree.
"""

from __future__ import annotations

from pathlib import Path

import torch

from speculators_core.models.eagle3 import Eagle3Draft
from speculators_core.models.verifier import Verifier, load_verifier
from tests import tiny


def agreeing_pair(verifier_dir: Path, share: float) -> tuple[Verifier, Eagle3Draft]:
    verifier = load_verifier(verifier_dir)
    for layer in verifier.layers:
        layer.self_attn.o_proj.weight.mul_(share)
        layer.mlp.down_proj.weight.mul_(share)
    return verifier, _echo_draft(verifier)


@torch.no_grad()
def _echo_draft(verifier: Verifier) -> Eagle3Draft:
    draft = Eagle3Draft(tiny.draft_config(verifier.facts.path, draft_vocab=tiny.VOCAB)).eval()
    for name, tensor in draft.named_parameters():
        tensor.fill_(1.0 if "norm" in name else 0.0)
    draft.layers[0].hidden_norm.weight.zero_()
    draft.embed_tokens.weight.copy_(verifier.embedding)
    draft.norm.weight.copy_(verifier.final_norm.weight)
    draft.lm_head.weight.copy_(verifier.lm_head)
    attention = draft.layers[0].self_attn
    width, group = tiny.HEAD_DIM, tiny.HEADS // tiny.KV_HEADS
    eye = torch.eye(width)
    for kv in range(tiny.KV_HEADS):
        own = slice(kv * width, (kv + 1) * width)  # this head's part of the normed embedding
        attention.k_proj.weight[own, own] = 4 * eye
        attention.v_proj.weight[own, own] = eye
        for head in range(kv * group, (kv + 1) * group):
            attention.q_proj.weight[head * width : (head + 1) * width, own] = 4 * eye
        first = kv * group * width
        attention.o_proj.weight[own, first : first + width] = eye
    return draft.requires_grad_(False)
