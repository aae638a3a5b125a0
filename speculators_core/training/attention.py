"""Attention of the unrolled draft steps (training-time test, arXiv 2503.01840 section 3.2).

At step 0 every token sees the tokens of its own document up to itself. At step k a chain that
started at t sees the same step-0 keys, 0..t, and one key of each step 1..k: its own. So the mask
over all steps is a causal block and a diagonal per further step; nothing else is ever computed or
stored. Scores live only for one document and `CHUNK` queries at a time, in the backward pass too,
so memory grows with the number of tokens, not with its square.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from speculators_core.training.precision import compute_dtype

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
    """An `Attend` for `Eagle3Draft.step` with the keys and values of all steps so far.

    `tokens` are the queries of a whole row, which the layers before the last ask with at step 0.
    `kept` are those keys and values as one flat list: step by step, layer by layer, key before
    value. Before each step call `begin`; run the step with `holding(kept)`, and `keep` what that
    `added`.
    """

    tokens: Queries
    last_layer: int
    chains: Queries = field(init=False)
    kept: list[Tensor] = field(default_factory=list)
    added: list[Tensor] = field(default_factory=list)

    def begin(self, chains: Queries, stay: Tensor | None) -> None:
        """A step of these chains. From the second step on, `stay` [M] says which queries of the
        step before they are."""
        self.chains = chains
        if stay is not None:
            first = self._step
            self.kept = [kept if i < first else kept[:, stay] for i, kept in enumerate(self.kept)]

    def holding(self, kept: Sequence[Tensor], chains: Queries) -> UnrolledAttention:
        """One step's own, which changes nothing here."""
        mine = UnrolledAttention(self.tokens, self.last_layer, list(kept))
        mine.chains = chains
        return mine

    def keep(self, added: Sequence[Tensor]) -> None:
        """The keys and values of the step that has been run."""
        self.kept += added

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [1, heads, M, D]; k, v [1, kv_heads, M, D], at step 0 of all tokens."""
        dtype = compute_dtype(q)
        q, k, v = q[0].to(dtype), k[0].to(dtype), v[0].to(dtype)
        self.added += [k, v]
        keys = [*self.kept[2 * layer :: self._step], k]
        values = [*self.kept[2 * layer + 1 :: self._step], v]
        all_ask = len(keys) == 1 and layer != self.last_layer
        out: Tensor = _Unrolled.apply(  # type: ignore[no-untyped-call]
            q,
            keys[0],
            values[0],
            torch.stack(keys[1:], 1) if keys[1:] else None,
            torch.stack(values[1:], 1) if values[1:] else None,
            self.tokens if all_ask else self.chains,
        )
        return out[None]

    @property
    def _step(self) -> int:
        """Tensors that a step adds."""
        return 2 * (self.last_layer + 1)


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
        log_sums = q.new_empty(q.shape[:2], dtype=_exact(q))
        with torch.autocast(q.device.type, enabled=False):
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
        weight = (grad * out).sum(-1, dtype=log_sums.dtype)  # (heads, M), the softmax's own term
        for rows, keys, mask in _chunks(ctx.asking):
            part = _Part(q, k0, own_k, rows, keys, mask)
            p0, p_own = part.probabilities(part.grouped(log_sums[:, rows]))
            g, w = part.grouped(grad[:, rows]), part.grouped(weight[:, rows])
            flat_g, flat_p = part.flat(g), part.flat(p0)
            grad_v[:, keys] += flat_p.to(g.dtype).transpose(1, 2) @ flat_g
            ds = flat_p * (flat_g @ v0[:, keys].transpose(1, 2) - part.flat(w[..., None]))
            ds = (ds * part.scale).to(g.dtype)
            dq = (ds @ k0[:, keys]).view_as(part.q)
            grad_k[:, keys] += ds.transpose(1, 2) @ part.flat(part.q)
            if own_k is not None and grad_own_k is not None and grad_own_v is not None:
                # (kv, group, M, n) scores; own keys and values (kv, n, M, D)
                grad_own_v[:, :, rows] = torch.einsum("hgmn,hgmd->hnmd", p_own.to(g.dtype), g)
                gv = torch.einsum("hgmd,hnmd->hgmn", g, own_v[:, :, rows])
                ds_own = (p_own * (gv - w[..., None]) * part.scale).to(g.dtype)
                dq = dq + torch.einsum("hgmn,hnmd->hgmd", ds_own, own_k[:, :, rows])
                grad_own_k[:, :, rows] = torch.einsum("hgmn,hgmd->hnmd", ds_own, part.q)
            grad_q[:, rows] = dq.reshape(q.shape[0], -1, q.shape[-1])
        return grad_q, grad_k, grad_v, grad_own_k, grad_own_v, None


class _Part:
    """The scores of one chunk of queries of one document: [kv, group, m, s] and [.., n]. In
    float32 at least, whatever number format products are in."""

    def __init__(
        self, q: Tensor, k0: Tensor, own_k: Tensor | None, rows: slice, keys: slice, mask: Tensor
    ) -> None:
        self.kv = k0.shape[0]
        self.scale = q.shape[-1] ** -0.5
        self.rows, self.keys = rows, keys
        self.q = self.grouped(q[:, rows])
        exact = _exact(q)
        scores = (self.flat(self.q) @ k0[:, keys].transpose(1, 2)).to(exact) * self.scale
        scores = scores.view(*self.q.shape[:3], -1)
        self.scores = scores.masked_fill(mask, float("-inf"))
        self.own = (
            torch.einsum("hgmd,hnmd->hgmn", self.q, own_k[:, :, rows]).to(exact) * self.scale
            if own_k is not None
            else q.new_empty(*self.q.shape[:3], 0, dtype=exact)
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
        out = (self.flat(p0).to(v0.dtype) @ v0[:, self.keys]).view_as(self.q)
        if own_v is not None:
            own = own_v[:, :, self.rows]
            out = out + torch.einsum("hgmn,hnmd->hgmd", p_own.to(own.dtype), own)
        return out

    def grouped(self, x: Tensor) -> Tensor:
        """[heads, m, …] → [kv, group, m, …]"""
        return x.reshape(self.kv, -1, *x.shape[1:])

    def flat(self, x: Tensor) -> Tensor:
        """[kv, group, m, s] → [kv, group*m, s]"""
        return x.reshape(self.kv, -1, x.shape[-1])


def _exact(x: Tensor) -> torch.dtype:
    """The number format of sums and scores."""
    return torch.promote_types(x.dtype, torch.float32)


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
