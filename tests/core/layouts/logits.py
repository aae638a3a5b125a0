"""What a converted draft proposes, in the verifier's vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from speculators_core.models.eagle3 import Eagle3Draft
from tests.core.layouts import Shape

LENGTH, STEPS = 10, 3


def inputs(shape: Shape, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Aux states [1, LENGTH, n_aux*H] and the tokens [1, LENGTH] behind them."""
    generator = torch.Generator().manual_seed(seed)
    aux = torch.randn(1, LENGTH, shape.num_aux * shape.wide, generator=generator)
    return aux, torch.randint(0, shape.vocab, (1, LENGTH), generator=generator)


@torch.no_grad()
def logits(draft: Eagle3Draft, aux: Tensor, tokens: Tensor) -> Tensor:
    """Logits [STEPS, 1, LENGTH, V] of steps that each see the step before; -inf for tokens that
    the draft can't propose.
    """
    hidden, out = draft.combine(aux), []
    for step in range(STEPS):
        positions = step + torch.arange(LENGTH)[None]
        normed, hidden = draft.step(tokens.roll(-step, 1), hidden, positions, _causal)
        drafted = draft.logits(normed)
        whole = torch.full((1, LENGTH, draft.config.vocab_size), -torch.inf)
        rows = torch.arange(drafted.shape[-1])
        whole[..., draft.to_verifier_ids(rows)] = drafted
        out.append(whole)
    return torch.stack(out)


def _causal(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
