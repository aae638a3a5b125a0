"""The loss of the unrolled draft steps, and what it says about acceptance.

Let the chain start at t. Step k predicts x_{t+2+k}; its target is the verifier's own distribution
there, softmax(lm_head(norm(y_{t+1+k}))) over the draft vocabulary, and its loss a divergence
between the two (`training.divergence`; forward KL by default). Steps are averaged over their live
chains and summed with weights decay^k.

Acceptance is honest: a chain is right at step k when the draft's first choice is the verifier's
first choice over its *whole* vocabulary, so a token that the draft can't propose is a miss; and it
counts as accepted only when all steps before it were right too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from speculators_core.models.eagle3 import Eagle3Draft
from speculators_core.models.logit_rule import LogitRule
from speculators_core.training.attention import UnrolledAttention
from speculators_core.training.divergence import Divergence, kl
from speculators_core.training.packing import Packed
from speculators_core.training.precision import compute_dtype

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

    def __init__(
        self,
        final_norm: torch.nn.Module,
        head: Tensor,
        kept: Tensor,
        rule: LogitRule = LogitRule(),
    ) -> None:
        self.final_norm = final_norm
        self.rule = rule
        self.ids = kept.nonzero().flatten()
        self.rows = head[self.ids]
        self.draft_id = torch.full((len(kept),), -1, dtype=torch.int64, device=head.device)
        self.draft_id[self.ids] = torch.arange(len(self.ids), device=head.device)

    @torch.no_grad()
    def targets(self, batch: Packed) -> Targets:
        at = batch.starts + 1
        logits = self.rule(self.final_norm(batch.final[at].to(self.rows.dtype)) @ self.rows.T)
        log_p = torch.log_softmax(logits.float(), dim=-1)
        p = log_p.exp()
        entropy = -(p * log_p).sum(-1)
        return Targets(p, entropy, self.draft_id[batch.best[at]])


class Unroller(nn.Module):
    """A draft with the loss it is trained for: what data parallelism wraps.

    `again`: compute each step again on the way back instead of keeping what is inside it.
    """

    def __init__(
        self,
        draft: Eagle3Draft,
        steps: int,
        decay: float = 1.0,
        divergence: Divergence = kl,
        *,
        again: bool = False,
    ) -> None:
        super().__init__()
        self.draft = draft
        self.steps, self.decay, self.divergence, self.again = steps, decay, divergence, again

    def forward(
        self, batch: Packed | None, targets: Targets | None, live: Tensor | None
    ) -> tuple[Tensor, Unrolled | None]:
        """The loss, and all of it. Without chains a loss of 0 that still has all parameters in
        its graph, so that whoever averages gradients finds this process among the others."""
        if batch is None or targets is None:
            nothing = torch.stack([p.sum() * 0 for _, p in self.draft.trainable()]).sum()
            return nothing, None
        result = self.unroll(batch, targets, live)
        return result.loss, result

    def unroll(self, batch: Packed, targets: Targets, live: Tensor | None = None) -> Unrolled:
        """Run the draft steps over every chain of the batch.

        `live` [K]: the chains by which the sum of each step's losses is divided, where the batch
        is a part of something larger; else the batch's own.
        """
        chains = [(batch.left > k).nonzero().flatten() for k in range(self.steps)]
        counts = torch.tensor([len(c) for c in chains])
        weights = self.decay ** torch.arange(self.steps) / (counts if live is None else live).clamp(
            min=1
        )
        normed = torch.cat(self._states(batch, chains))
        rows = torch.cat([c + k for k, c in enumerate(chains)])
        device = normed.device
        loss, losses, choice = head_loss(
            normed,
            self.draft.lm_head.weight,
            targets,
            rows,
            weights.to(device, torch.float32).repeat_interleave(counts.to(device)),
            self.divergence,
        )
        return Unrolled(
            loss=loss,
            step_losses=torch.stack([part.sum() for part in torch.split(losses, counts.tolist())]),
            live=counts,
            accepted=_accepted(choice == targets.best[rows], chains, len(batch.starts)),
            covered=int((targets.best >= 0).sum()),
        )

    def _states(self, batch: Packed, chains: Sequence[Tensor]) -> list[Tensor]:
        """Normed states [M_k, Hd] of every step, for its live chains."""
        attend = UnrolledAttention(batch.tokens(), last_layer=len(self.draft.layers) - 1)
        hidden = self.draft.combine(batch.aux[None])
        before: Tensor | None = None
        states = []
        for k, live in enumerate(chains):
            stay = None if before is None else torch.isin(before, live).nonzero().flatten()
            attend.begin(batch.asking(live), stay)
            asked = hidden if stay is None else hidden[:, stay]
            normed, hidden = self._step(batch, attend, live, asked, k)
            states.append(normed[0])
            before = live
        return states

    def _step(
        self, batch: Packed, attend: UnrolledAttention, live: Tensor, hidden: Tensor, k: int
    ) -> tuple[Tensor, Tensor]:
        """Step k for the chains `live` [M]: normed and the next state, [1, M, Hd] each."""
        starts, asking = batch.starts[live], attend.chains
        if k == 0:  # every token gives a key; only the chains ask
            tokens, positions, rows = torch.roll(batch.ids, -1), batch.positions, starts
        else:
            tokens, positions, rows = batch.ids[starts + 1 + k], batch.positions[starts] + k, None

        def step(state: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
            """Pure: what it needs comes in and what it adds comes out, so it can be run again
            when `attend` is steps ahead."""
            mine = attend.holding(kept, asking)
            out = self.draft.step(tokens[None], state, positions[None], mine, rows=rows)
            return (*out, *mine.added)

        if self.again and torch.is_grad_enabled():
            out = checkpoint(
                step, hidden, *attend.kept, use_reentrant=False, preserve_rng_state=False
            )
        else:
            out = step(hidden, *attend.kept)
        attend.keep(out[2:])
        return out[0], out[1]


def unroll(
    draft: Eagle3Draft,
    batch: Packed,
    targets: Targets,
    *,
    steps: int,
    decay: float = 1.0,
    divergence: Divergence = kl,
) -> Unrolled:
    """Run `steps` draft steps over every chain of the batch."""
    return Unroller(draft, steps, decay, divergence).unroll(batch, targets)


def _accepted(right: Tensor, chains: Sequence[Tensor], count: int) -> Tensor:
    """[C, K] bool from [ΣM] bool: right at a step and all steps before."""
    accepted = torch.zeros(count, len(chains), dtype=torch.bool, device=right.device)
    parts = torch.split(right, [len(c) for c in chains])
    for k, (live, part) in enumerate(zip(chains, parts, strict=True)):
        accepted[live, k] = part & accepted[live, k - 1] if k else part
    return accepted


def head_loss(
    normed: Tensor,
    head: Tensor,
    targets: Targets,
    rows: Tensor,
    weights: Tensor,
    divergence: Divergence = kl,
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ weights · divergence(softmax(normed headᵀ), targets[rows]); the divergences themselves
    [M] and the first choices [M], both without a graph.

    normed [M, Hd], head [dv, Hd], rows [M], weights [M]. Logits exist for `ROWS` rows at a time:
    the gradients are taken on the way forward, from the slopes that the divergence gives.
    """
    loss, values, choice = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        normed, head, targets, rows, weights, divergence, compute_dtype(normed)
    )
    return loss, values, choice


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        normed: Tensor,
        head: Tensor,
        targets: Targets,
        rows: Tensor,
        weights: Tensor,
        divergence: Divergence,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad_normed = torch.zeros_like(normed) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        values = torch.empty_like(weights)
        choice = torch.empty(len(normed), dtype=torch.int64, device=normed.device)
        table = head.to(dtype)
        with torch.autocast(normed.device.type, enabled=False):
            for start in range(0, len(normed), ROWS):
                part = slice(start, start + ROWS)
                x, at = normed[part].to(dtype), rows[part]
                log_q = torch.log_softmax((x @ table.T).to(values.dtype), dim=-1)
                choice[part] = log_q.argmax(-1)
                values[part], slope = divergence(
                    log_q, targets.probabilities[at], targets.entropy[at]
                )
                if grad_normed is not None or grad_head is not None:
                    slope = slope.mul_(weights[part, None]).to(dtype)
                    if grad_normed is not None:
                        grad_normed[part] = slope @ table
                    if grad_head is not None:
                        _add_product(grad_head, slope, x)
        ctx.save_for_backward(grad_normed, grad_head)
        ctx.mark_non_differentiable(values, choice)
        return (values * weights).sum(), values, choice

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_normed, grad_head = ctx.saved_tensors
        return (
            grads[0] * grad_normed if grad_normed is not None else None,
            grads[0] * grad_head if grad_head is not None else None,
            *(None,) * 5,
        )


def _add_product(total: Tensor, slope: Tensor, x: Tensor) -> None:
    """total += slopeᵀ x, in place where the number formats agree."""
    if slope.dtype == total.dtype:
        total.addmm_(slope.T, x)
    else:
        total.add_(slope.T @ x)
