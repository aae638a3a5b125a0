"""Attention of the unrolled draft steps (training-time test, arXiv 2503.01840 section 3.2).

At step 0 every token sees the tokens of its own document up to itself. At step k a chain that
started at t sees the same step-0 keys, 0..t, and one key of each step 1..k: its own. So the mask
over all steps is a causal block and a diagonal per further step; nothing else is ever computed or
stored. Scores live only for one document and `CHUNK` queries at a time, in the backward pass too,
so memory grows with the number of tokens, not with its square.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

CHUNK = 512


@dataclass(frozen=True)
class Span:
    """The queries `rows` (of this step) of one document, and its step-0 keys `keys`."""

    rows: slice
    keys: slice


@dataclass(frozen=True)
class Queries:
    """Who asks in a step: `spans` over M queries, each of which sees the first `sees` [M] step-0
    keys of its document."""

    spans: tuple[Span, ...]
    sees: Tensor


@dataclass
class UnrolledAttention:
    """An `Attend` for `Eagle3Draft.step` that keeps the keys of all steps so far.

    `tokens` are the queries of a whole row, which the layers before the last ask with at step 0.
    Call `begin` before each step.
    """

    tokens: Queries
    last_layer: int
    chains: Queries = field(init=False)
    unrolling: bool = False
    first: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    later: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def begin(self, chains: Queries, stay: Tensor | None) -> None:
        """A step of these chains. From the second step on, `stay` [M] says which queries of the
        step before they are."""
        self.chains, self.unrolling = chains, stay is not None
        if stay is not None:
            self.later = {
                layer: [(k[:, stay], v[:, stay]) for k, v in kept]
                for layer, kept in self.later.items()
            }

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [1, heads, M, D]; k, v [1, kv_heads, M, D], at step 0 of all tokens."""
        if self.unrolling:
            self.later.setdefault(layer, []).append((k[0], v[0]))
        else:
            self.first[layer] = (k[0], v[0])
        all_ask = not self.unrolling and layer != self.last_layer
        asking = self.tokens if all_ask else self.chains
        own = self.later.get(layer, [])
        out: Tensor = _Unrolled.apply(  # type: ignore[no-untyped-call]
            q[0],
            *self.first[layer],
            torch.stack([key for key, _ in own], 1) if own else None,
            torch.stack([value for _, value in own], 1) if own else None,
            asking,
        )
        return out[None]


class _Unrolled(torch.autograd.Function):
    """softmax([q K0ᵀ | q·k_1 … q·k_n]) [V0 | v_1 … v_n], with the scores recomputed backward.

    q [heads, M, D]; k0, v0 [kv, T, D]; own keys and values [kv, n, M, D] or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k0: Tensor,
        v0: Tensor,
        own_k: Tensor | None,
        own_v: Tensor | None,
        asking: Queries,
    ) -> Tensor:
        out = torch.empty_like(q)
        log_sums = q.new_empty(q.shape[:2])
        for rows, keys, mask in _chunks(asking):
            part = _Part(q, k0, own_k, rows, keys, mask)
            log_sums[:, rows] = part.log_sum.reshape(q.shape[0], -1)
            probabilities = part.probabilities(part.log_sum)
            mixed = part.mix(*probabilities, v0, own_v)
            out[:, rows] = mixed.reshape(q.shape[0], -1, q.shape[-1])
        ctx.save_for_backward(q, k0, v0, own_k, own_v, out, log_sums)
        ctx.asking = asking
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k0, v0, own_k, own_v, out, log_sums = ctx.saved_tensors
        (grad,) = grads
        grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k0), torch.zeros_like(v0)
        grad_own_k = torch.zeros_like(own_k) if own_k is not None else None
        grad_own_v = torch.zeros_like(own_v) if own_v is not None else None
        weight = (grad * out).sum(-1)  # (heads, M), the softmax's own term
        for rows, keys, mask in _chunks(ctx.asking):
            part = _Part(q, k0, own_k, rows, keys, mask)
            p0, p_own = part.probabilities(part.grouped(log_sums[:, rows]))
            g, w = part.grouped(grad[:, rows]), part.grouped(weight[:, rows])
            flat_g, flat_p = part.flat(g), part.flat(p0)
            grad_v[:, keys] += flat_p.transpose(1, 2) @ flat_g
            ds = flat_p * (flat_g @ v0[:, keys].transpose(1, 2) - part.flat(w[..., None]))
            ds = ds * part.scale
            dq = (ds @ k0[:, keys]).view_as(part.q)
            grad_k[:, keys] += ds.transpose(1, 2) @ part.flat(part.q)
            if own_k is not None and grad_own_k is not None and grad_own_v is not None:
                # (kv, group, M, n) scores; own keys and values (kv, n, M, D)
                grad_own_v[:, :, rows] = torch.einsum("hgmn,hgmd->hnmd", p_own, g)
                gv = torch.einsum("hgmd,hnmd->hgmn", g, own_v[:, :, rows])
                ds_own = p_own * (gv - w[..., None]) * part.scale
                dq = dq + torch.einsum("hgmn,hnmd->hgmd", ds_own, own_k[:, :, rows])
                grad_own_k[:, :, rows] = torch.einsum("hgmn,hgmd->hnmd", ds_own, part.q)
            grad_q[:, rows] = dq.reshape(q.shape[0], -1, q.shape[-1])
        return grad_q, grad_k, grad_v, grad_own_k, grad_own_v, None


class _Part:
    """The scores of one chunk of queries of one document: [kv, group, m, s] and [.., n]."""

    def __init__(
        self, q: Tensor, k0: Tensor, own_k: Tensor | None, rows: slice, keys: slice, mask: Tensor
    ) -> None:
        self.kv = k0.shape[0]
        self.scale = q.shape[-1] ** -0.5
        self.rows, self.keys = rows, keys
        self.q = self.grouped(q[:, rows])
        scores = self.flat(self.q) @ k0[:, keys].transpose(1, 2) * self.scale
        scores = scores.view(*self.q.shape[:3], -1)
        self.scores = scores.masked_fill(mask, float("-inf"))
        self.own = (
            torch.einsum("hgmd,hnmd->hgmn", self.q, own_k[:, :, rows]) * self.scale
            if own_k is not None
            else q.new_empty(*self.q.shape[:3], 0)
        )

    @property
    def log_sum(self) -> Tensor:
        """[kv, group, m]"""
        whole = torch.logsumexp(self.scores, -1)
        return torch.logaddexp(whole, torch.logsumexp(self.own, -1)) if self.own.numel() else whole

    def probabilities(self, log_sum: Tensor) -> tuple[Tensor, Tensor]:
        return (self.scores - log_sum[..., None]).exp(), (self.own - log_sum[..., None]).exp()

    def mix(self, p0: Tensor, p_own: Tensor, v0: Tensor, own_v: Tensor | None) -> Tensor:
        """[kv, group, m, D]"""
        out = (self.flat(p0) @ v0[:, self.keys]).view_as(self.q)
        if own_v is not None:
            out = out + torch.einsum("hgmn,hnmd->hgmd", p_own, own_v[:, :, self.rows])
        return out

    def grouped(self, x: Tensor) -> Tensor:
        """[heads, m, …] → [kv, group, m, …]"""
        return x.reshape(self.kv, -1, *x.shape[1:])

    def flat(self, x: Tensor) -> Tensor:
        """[kv, group, m, s] → [kv, group*m, s]"""
        return x.reshape(self.kv, -1, x.shape[-1])


def _chunks(asking: Queries) -> list[tuple[slice, slice, Tensor]]:
    """(rows, keys that any of them sees, mask [m, s] of what each may not see)."""
    result = []
    for span in asking.spans:
        for start in range(span.rows.start, span.rows.stop, CHUNK):
            rows = slice(start, min(start + CHUNK, span.rows.stop))
            sees = asking.sees[rows]
            longest = int(sees.max())
            keys = slice(span.keys.start, span.keys.start + longest)
            hidden = torch.arange(longest, device=sees.device) >= sees[:, None]
            result.append((rows, keys, hidden))
    return result
