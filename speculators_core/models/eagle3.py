"""The EAGLE-3 draft network (arXiv 2503.01840), one file.

    g  = concat of the verifier's aux states, ascending depth          [B, S, n_aux*H]
    h  = fc(g)                                                         [B, S, Hd]
    x  = layers(E[token], h)     layer 0 sees concat(norm(E), norm(h)) [B, S, 2*Hd]
    logits = lm_head(norm(x)), over the draft vocabulary               [B, S, dv]
    next h = x, or norm(x) with `norm_output`

What a token may look at differs between training (several unrolled steps at once) and decoding
(a KV cache), so attention itself is a function that the caller passes in: `Attend`. Parameter
names are those of the speculators format, so a state dict is a checkpoint.

Layers are a Llama's, or a Qwen3's: the same with a norm over each head of query and key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from speculators_core.config import Eagle3Config, LayerConfig

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [B, heads, S, D], k [B, kv_heads, S, D], v like k) → [B, heads, S, D]. Head norms and
rotary positions are applied already; the function owns masks and caches, and scales by D^-0.5."""


class DraftAttention(nn.Module):
    """Projections and rotary positions; what is attended to is the caller's `Attend`."""

    def __init__(self, config: LayerConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.norms_heads = config.norms_heads
        width = config.hidden_size * (2 if layer == 0 else 1)
        heads = config.num_attention_heads * self.head_dim
        kv_heads = config.num_key_value_heads * self.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(width, heads, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads, bias=bias)
        self.o_proj = nn.Linear(heads, config.hidden_size, bias=bias)
        if self.norms_heads:
            self.q_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """[B, S, width] → [B, S, Hd], or [B, M, Hd] where only the queries `rows` [M] matter."""
        asking = x if rows is None else x[:, rows]
        q, k, v = (
            proj(source).view(*source.shape[:2], -1, self.head_dim).transpose(1, 2)
            for proj, source in ((self.q_proj, asking), (self.k_proj, x), (self.v_proj, x))
        )
        if self.norms_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        if rows is None:
            q, k = apply_rotary_pos_emb(q, k, *rotary)
        else:
            cos, sin = rotary
            q, _ = apply_rotary_pos_emb(q, q[:, :1], cos[:, rows], sin[:, rows])
            k, _ = apply_rotary_pos_emb(k, k[:, :1], cos, sin)
        attended = attend(self.layer, q, k, v)  # (B, heads, S or M, D)
        out: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return out


class DraftLayer(nn.Module):
    """One decoder layer. Layer 0 takes the token's embedding beside the state."""

    def __init__(self, config: LayerConfig, layer: int, *, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if layer == 0:
            self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DraftAttention(config, layer)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(llama_config(config))

    def forward(
        self,
        hidden: Tensor,
        embeds: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
        rows: Tensor | None = None,
    ) -> Tensor:
        residual = hidden
        if embeds is None:
            x = self.input_layernorm(hidden)
        else:
            normed = self.hidden_norm(hidden)
            if self.norm_before_residual:
                residual = normed
            x = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        if rows is not None:
            residual = residual[:, rows]
        hidden = residual + self.self_attn(x, rotary, attend, rows)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3Draft(nn.Module):
    """An EAGLE-3 draft with its vocabulary map.

    Buffers `d2t` [dv] int64 (offset: verifier id = i + d2t[i]) and `t2d` [V] bool exist only when
    the draft vocabulary is smaller than the verifier's. Frozen: `embed_tokens`, unless the config
    says `embed_requires_grad`; with `shares_embedding` it is the verifier's table, and not saved.
    """

    d2t: Tensor
    t2d: Tensor
    shares_embedding: bool = False

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        layer_config = config.transformer_layer_config
        hd, eps = config.hidden_size, layer_config.rms_norm_eps
        width = config.num_aux * config.verifier_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hd)
        self.embed_tokens.weight.requires_grad = config.embed_requires_grad
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(width, eps=eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                LlamaRMSNorm(config.verifier_hidden_size, eps=eps) for _ in range(config.num_aux)
            )
        self.fc = nn.Linear(width, hd, bias=False)
        self.layers = nn.ModuleList(
            DraftLayer(layer_config, i, norm_before_residual=config.norm_before_residual)
            for i in range(layer_config.num_hidden_layers)
        )
        self.norm = LlamaRMSNorm(hd, eps=eps)
        self.lm_head = nn.Linear(hd, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(llama_config(layer_config))
        if config.has_vocab_map:
            dv = config.draft_vocab_size
            self.register_buffer("d2t", torch.zeros(dv, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < dv)

    def combine(self, aux: Tensor) -> Tensor:
        """Aux states [B, S, n_aux*H] → the first draft state [B, S, Hd]."""
        if self.config.norm_before_fc:
            aux = self.input_norm(aux)
        if self.config.fc_norm:
            chunks = aux.chunk(self.config.num_aux, dim=-1)
            aux = torch.cat(
                [norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1
            )
        hidden: Tensor = self.fc(aux)
        return hidden

    def step(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        attend: Attend,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One draft step.

        `tokens` [B, S] are the newest tokens (verifier ids), `hidden` [B, S, Hd] the state that
        each continues, `positions` [B, S] rotary positions (only differences matter). Returns
        `(normed, next_hidden)`, both [B, S, Hd]: `logits(normed)` are the draft's, `next_hidden`
        is what the next step takes. With `rows` [M] both are [B, M, Hd]: the last layer asks for
        those positions alone, though all of them are seen.
        """
        embeds: Tensor | None = self.embed_tokens(tokens).to(hidden.dtype)
        rotary = self.rotary(hidden, positions)
        for i, layer in enumerate(self.layers, 1):
            asked = rows if i == len(self.layers) else None
            hidden = layer(hidden, embeds, rotary, attend, asked)
            embeds = None  # only layer 0 sees the token
        normed = self.norm(hidden)
        return normed, normed if self.config.norm_output else hidden

    def logits(self, normed: Tensor) -> Tensor:
        """[..., Hd] → logits over the draft vocabulary [..., dv]."""
        logits: Tensor = self.lm_head(normed)
        return logits

    def to_verifier_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft ids of any shape → verifier ids of that shape."""
        return draft_ids + self.d2t[draft_ids] if self.config.has_vocab_map else draft_ids

    @property
    def kept(self) -> Tensor:
        """[V] bool: the verifier ids that the draft can propose."""
        if self.config.has_vocab_map:
            return self.t2d
        return torch.ones(self.config.vocab_size, dtype=torch.bool, device=self.fc.weight.device)

    def set_vocab_map(self, kept: Tensor) -> None:
        """Install a map from `kept` [V] bool with exactly dv true entries."""
        ids = kept.nonzero().flatten()
        if len(ids) != self.config.draft_vocab_size:
            raise ValueError(f"{len(ids)} tokens kept, expected {self.config.draft_vocab_size}")
        self.t2d.copy_(kept)
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))

    def trainable(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Named parameters that training changes."""
        return ((n, p) for n, p in self.named_parameters() if p.requires_grad)


def llama_config(layers: LayerConfig) -> LlamaConfig:
    """The draft's layers as transformers knows them (rotary scaling included). What it is used
    for, MLP and rotary positions, a Qwen3 layer computes in the same way."""
    return LlamaConfig(**layers.model_dump(exclude={"model_type"}))
