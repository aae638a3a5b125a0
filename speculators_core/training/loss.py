"""The loss of the unrolled draft steps, and what it says about acceptance.

Let the chain start at t. Step k predicts x_{t+2+k}; its target is the verifier's own distribution
there, softmax(lm_head(norm(y_{t+1+k}))) over the draft vocabulary, and its loss the forward KL
divergence KL(verifier || draft). Steps are averaged over their live chains and summed with weights
decay^k.

Acceptance is honest: a chain is right at step k when the draft's first choice is the verifier's
first choice over its *whole* vocabulary, so a token that the draft can't propose is a miss; and it
counts as accepted only when all steps before it were right too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speculators_core.models.eagle3 import Eagle3Draft
from speculators_core.training.attention import UnrolledAttention
from speculators_core.training.packing import Packed

ROWS = 256  # rows of logits that exist at once


@dataclass(frozen=True)
class Targets:
    """The verifier's opinion on each token that follows a chain's newest one, C of them.

    Row i is about the token after position `starts[i] + 1`; step k of chain i uses row i + k.
    """

    probabilities: Tensor  # [C, dv] over the draft vocabulary, renormalised
    entropy: Tensor  # [C] of them
    best: Tensor  # [C] its first choice as a draft id, -1 where the draft has none


@dataclass(frozen=True)
class Unrolled:
    """Loss (a scalar with a graph) and counts of one batch."""

    loss: Tensor
    step_losses: Tensor  # [K] sums over live chains
    live: Tensor  # [K] chains that reach step k
    accepted: Tensor  # [C, K] bool: right at k and all steps before
    covered: int  # first choices of the verifier that the draft can propose


class TargetHead:
    """The verifier's final norm and head, over the draft vocabulary and over all of it."""

    def __init__(self, final_norm: torch.nn.Module, head: Tensor, kept: Tensor) -> None:
        self.final_norm = final_norm
        self.ids = kept.nonzero().flatten()
        self.rows = head[self.ids]
        self.draft_id = torch.full((len(kept),), -1, dtype=torch.int64, device=head.device)
        self.draft_id[self.ids] = torch.arange(len(self.ids), device=head.device)

    @torch.no_grad()
    def targets(self, batch: Packed) -> Targets:
        at = batch.starts + 1
        logits = self.final_norm(batch.final[at].to(self.rows.dtype)) @ self.rows.T
        log_p = torch.log_softmax(logits.float(), dim=-1)
        p = log_p.exp()
        entropy = -(p * log_p).sum(-1)
        return Targets(p, entropy, self.draft_id[batch.best[at]])


def unroll(
    draft: Eagle3Draft, batch: Packed, targets: Targets, *, steps: int, decay: float = 1.0
) -> Unrolled:
    """Run `steps` draft steps over every chain of the batch."""
    chains = len(batch.starts)
    device = batch.starts.device
    step_losses, live_counts = [], []
    accepted = torch.zeros(chains, steps, dtype=torch.bool, device=device)
    loss = torch.zeros((), device=device)
    attend = UnrolledAttention(batch.tokens(), last_layer=len(draft.layers) - 1)
    live = torch.arange(chains, device=device)
    hidden = draft.combine(batch.aux[None])
    for k in range(steps):
        stay = (batch.left[live] > k).nonzero().flatten()
        live = live[stay]
        normed, hidden = _step(draft, batch, attend, live, hidden, stay, k)
        cross_entropy, choice = soft_cross_entropy(
            normed, draft.lm_head.weight, targets.probabilities, live + k
        )
        step_loss = cross_entropy - targets.entropy[live + k].sum()
        right = choice == targets.best[live + k]
        before = accepted[live, k - 1] if k else True
        accepted[live, k] = right & before
        loss = loss + decay**k * step_loss / max(len(live), 1)
        step_losses.append(step_loss.detach())
        live_counts.append(len(live))
    return Unrolled(
        loss=loss,
        step_losses=torch.stack(step_losses),
        live=torch.tensor(live_counts),
        accepted=accepted,
        covered=int((targets.best >= 0).sum()),
    )


def _step(
    draft: Eagle3Draft,
    batch: Packed,
    attend: UnrolledAttention,
    live: Tensor,
    hidden: Tensor,
    stay: Tensor,
    k: int,
) -> tuple[Tensor, Tensor]:
    """Step k for the chains `live` [M]: normed [M, Hd] and the next state [1, M, Hd]."""
    starts = batch.starts[live]
    attend.begin(batch.asking(live), stay if k else None)
    if k == 0:  # every token gives a key; only the chains ask
        newest = torch.roll(batch.ids, -1)
        normed, hidden = draft.step(
            newest[None], hidden, batch.positions[None], attend, rows=starts
        )
    else:
        normed, hidden = draft.step(
            batch.ids[starts + 1 + k][None],
            hidden[:, stay],
            (batch.positions[starts] + k)[None],
            attend,
        )
    return normed[0], hidden


def soft_cross_entropy(
    normed: Tensor, head: Tensor, probabilities: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Sum over M of the cross-entropy between softmax(normed headᵀ) and `probabilities[rows]`,
    and the first choices [M].

    normed [M, Hd], head [dv, Hd], probabilities [C, dv], rows [M]. Logits exist for `ROWS` rows
    at a time: the gradients are taken on the way forward, as softmax - target.
    """
    loss, choice = _SoftCrossEntropy.apply(  # type: ignore[no-untyped-call]
        normed, head, probabilities, rows
    )
    return loss, choice


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, normed: Tensor, head: Tensor, probabilities: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        grad_normed = torch.zeros_like(normed) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        loss = torch.zeros((), device=normed.device)
        choice = torch.empty(len(normed), dtype=torch.int64, device=normed.device)
        for start in range(0, len(normed), ROWS):
            part = slice(start, start + ROWS)
            x, target = normed[part], probabilities[rows[part]]
            log_softmax = torch.log_softmax((x @ head.T).float(), dim=-1)
            choice[part] = log_softmax.argmax(-1)
            loss = loss - (target * log_softmax).sum()
            if grad_normed is not None or grad_head is not None:
                slope = log_softmax.exp_().sub_(target).to(head.dtype)
                if grad_normed is not None:
                    grad_normed[part] = slope @ head
                if grad_head is not None:
                    grad_head.addmm_(slope.T, x)
        ctx.save_for_backward(grad_normed, grad_head)
        ctx.mark_non_differentiable(choice)
        return loss, choice

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_normed, grad_head = ctx.saved_tensors
        return (
            grads[0] * grad_normed if grad_normed is not None else None,
            grads[0] * grad_head if grad_head is not None else None,
            None,
            None,
        )
