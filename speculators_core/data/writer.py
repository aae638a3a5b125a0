"""Many texts at once from one verifier: batched decoding over a preallocated KV cache.

`transformers.generate` copies its cache at every token and repeats the key heads of grouped
attention; on a CPU that costs more than the model. Here each row owns a stretch of one buffer,
finished rows leave the batch, and tokens that all prompts share are computed once. Attention is
plugged into the model by name (`AttentionInterface`), everything else is the model's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from speculators_core.errors import InputError, PairingError
from speculators_core.models.verifier import Verifier

Choose = Callable[[Tensor], Tensor]
"""Logits [B, V] → the next token of each row [B]."""
Ended = Callable[[list[int]], bool]
"""Whether a row, given its new tokens so far, is complete."""
Tick = Callable[[int, int], bool | None]
"""Called after every step with (tokens written, rows still open); may raise to stop."""

_NAME = "speclab_rows"
_ALTERING = ("softcap", "s_aux", "position_bias")  # what some models add to plain attention
_HEAD = 1024  # most likely tokens looked at before the whole vocabulary is sorted


class Rows:
    """Keys and values of B rows, each filled from the left: [layers, B, kv_heads, L, D]."""

    def __init__(self, verifier: Verifier, count: int, length: int) -> None:
        facts, like = verifier.facts, verifier.embedding
        shape = (
            facts.num_hidden_layers,
            count,
            facts.num_key_value_heads,
            length,
            facts.head_dim,
        )
        self.keys = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.values = torch.zeros_like(self.keys)
        self.lengths = torch.zeros(count, dtype=torch.int64, device=like.device)

    def open(self, width: int) -> None:
        """Make room for `width` further tokens of every row, and say who sees what."""
        ahead = torch.arange(width, device=self.lengths.device)
        self.positions = self.lengths[:, None] + ahead  # (B, S)
        self.end = int(self.positions.max()) + 1
        seen = torch.arange(self.end, device=self.lengths.device)
        self.mask = (seen <= self.positions[:, :, None])[:, None]  # (B, 1, S, end)
        self.index = torch.arange(len(self.lengths), device=self.lengths.device)[:, None]

    def put(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [B, kv_heads, S, D]; all of the layer so far."""
        for buffer, new in ((self.keys, keys), (self.values, values)):
            buffer[layer].transpose(1, 2)[self.index, self.positions] = new.transpose(1, 2)
        return self.keys[layer, :, :, : self.end], self.values[layer, :, :, : self.end]

    def repeat(self, count: int) -> None:
        """One row becomes the beginning of `count` rows."""
        filled = int(self.lengths[0])
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(old.shape[0], count, *old.shape[2:])
            new[..., :filled, :] = old[..., :filled, :]
            setattr(self, name, new)
        self.lengths = self.lengths.expand(count).clone()

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]
        self.lengths = self.lengths[rows]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    rows: Rows,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [B, heads, S, D], key and value [B, kv_heads, S, D] → [B, S, heads, D]."""
    unknown = [name for name in _ALTERING if others.get(name) is not None]
    if unknown:
        raise PairingError(
            f"the verifier's attention has {unknown[0]}, which can't be written with yet",
            where=type(module).__name__,
            hint="write the chats with a server of this verifier, and prepare those",
        )
    keys, values = rows.put(module.layer_idx, key, value)  # type: ignore[arg-type]
    mask = rows.mask
    if sliding_window is not None:
        seen = torch.arange(rows.end, device=mask.device)
        mask = mask & (seen > rows.positions[:, None, :, None] - sliding_window)
    batch, heads, width, dim = query.shape
    kv_heads = keys.shape[1]
    if width == 1:  # the heads of a group are queries of one key head: nothing is repeated
        grouped = query.view(batch, kv_heads, heads // kv_heads, dim)
        seen_by = mask.expand(batch, 1, heads // kv_heads, rows.end)
        out = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=seen_by, scale=scaling
        )
        return out.reshape(batch, 1, heads, dim), None
    out = F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _attend)


@torch.inference_mode()
def write(
    verifier: Verifier,
    prompts: Sequence[list[int]],
    max_new: int,
    choose: Choose,
    ended: Ended,
    tick: Tick | None = None,
) -> list[list[int]]:
    """Continue every prompt by up to `max_new` tokens; the new tokens of each, in order.

    Where `tick` says False it ends there, with what is written so far. Prompts must not be empty.
    Memory: the KV cache of all prompts at full length.
    """
    if any(not prompt for prompt in prompts):
        raise InputError("an empty prompt can't be continued")
    if not prompts:
        return []
    with _plugged_in(verifier):
        return _write(verifier, prompts, max_new, choose, ended, tick)


def _write(
    verifier: Verifier,
    prompts: Sequence[list[int]],
    max_new: int,
    choose: Choose,
    ended: Ended,
    tick: Tick | None,
) -> list[list[int]]:
    rows, last = _prefill(verifier, prompts, max_new)
    written: list[list[int]] = [[] for _ in prompts]
    live = list(range(len(prompts)))
    total = 0
    while True:
        new = choose(verifier.logit_rule(verifier.model.get_output_embeddings()(last)))
        for row, token in zip(live, new.tolist(), strict=True):
            written[row].append(token)
        total += len(live)
        stay = [
            i for i, r in enumerate(live) if len(written[r]) < max_new and not ended(written[r])
        ]
        if (tick and tick(total, len(stay)) is False) or not stay:
            return written
        if len(stay) < len(live):
            live = [live[i] for i in stay]
            kept = torch.tensor(stay, device=new.device)
            new = new[kept]
            rows.keep(kept)
        last = _forward(verifier, rows, new[:, None])[:, 0]
        rows.lengths += 1


def _prefill(verifier: Verifier, prompts: Sequence[list[int]], max_new: int) -> tuple[Rows, Tensor]:
    """The rows filled with the prompts, and the last state of each [B, H]."""
    device = verifier.device
    shared = _shared_prefix(prompts)
    rows = Rows(verifier, 1 if shared else len(prompts), max(map(len, prompts)) + max_new)
    if shared:
        _forward(verifier, rows, torch.tensor([prompts[0][:shared]], device=device))
        rows.lengths += shared
        rows.repeat(len(prompts))
    rest = [torch.tensor(prompt[shared:], device=device) for prompt in prompts]
    widths = torch.tensor([len(r) for r in rest], device=device)
    states = _forward(verifier, rows, nn.utils.rnn.pad_sequence(rest, batch_first=True))
    rows.lengths += widths
    return rows, states[torch.arange(len(prompts), device=device), widths - 1]


def _forward(verifier: Verifier, rows: Rows, tokens: Tensor) -> Tensor:
    """Tokens [B, S] behind what the rows hold → normed states [B, S, H]."""
    rows.open(tokens.shape[1])
    states: Tensor = verifier.stack(
        tokens, position_ids=rows.positions, use_cache=False, rows=rows
    ).last_hidden_state
    return states


def _shared_prefix(prompts: Sequence[list[int]]) -> int:
    """How many first tokens all prompts share, leaving each at least one of its own."""
    limit = min(map(len, prompts)) - 1
    first = prompts[0]
    for i in range(limit):
        if any(prompt[i] != first[i] for prompt in prompts):
            return i
    return limit


@contextmanager
def _plugged_in(verifier: Verifier) -> Iterator[None]:
    """Our attention inside the model for the length of the block."""
    before = verifier.model.config._attn_implementation
    verifier.model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        verifier.model.set_attn_implementation(before)


def greedy(logits: Tensor) -> Tensor:
    """The most likely token of each row."""
    return logits.argmax(dim=-1)


def nucleus(temperature: float, top_p: float, generator: torch.Generator) -> Choose:
    """Sampling from the smallest set of tokens whose probability reaches `top_p`."""

    def choose(logits: Tensor) -> Tensor:
        probabilities = torch.softmax(logits.float() / temperature, dim=-1)
        ordered, ids = probabilities.topk(min(_HEAD, probabilities.shape[-1]), dim=-1)
        if bool((ordered.sum(-1) < top_p).any()):  # a flat row: sort the whole vocabulary
            ordered, ids = probabilities.sort(dim=-1, descending=True)
        ordered[ordered.cumsum(-1) - ordered >= top_p] = 0.0
        picked = torch.multinomial(ordered, 1, generator=generator)
        return ids.gather(-1, picked)[:, 0]

    return choose
