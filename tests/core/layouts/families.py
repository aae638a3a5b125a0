"""Tiny drafts of other algorithms than EAGLE-3, as their authors release them, and verifiers for
them: seeded, so that equal arguments give equal files.

    dflash      z-lab's layout        eagle   EAGLE-1, EAGLE-2, HASS
    with_mtp    a verifier of which an MTP head is a part
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.core.layouts import write
from tests.core.layouts.parts import Drawing, Weights, decoder_layer, layer_config

LAYERS = 8  # of the verifier
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Family:
    """Sizes of a draft of any of these kinds, and how its files are made."""

    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    inner: int = 48
    vocab: int = 96
    layers: int = 1
    dtype: str = "float32"
    tied: bool = False
    form: str = "safetensors"
    seed: int = 0


def drawn(seed: int, *forms: str) -> Family:
    """A different draft for each seed."""
    draw = random.Random(seed)
    heads = draw.choice((2, 4, 6))
    return Family(
        hidden=draw.choice((32, 48)),
        heads=heads,
        kv_heads=draw.choice([n for n in (1, 2, 3, heads) if heads % n == 0]),
        head_dim=draw.choice((8, 16)),
        inner=draw.choice((40, 64)),
        vocab=draw.choice((96, 130)),
        layers=draw.choice((1, 2, 3)),
        dtype=DTYPES[seed % 3],
        tied=bool(seed % 2),
        form=draw.choice(forms or ("safetensors",)),
        seed=seed,
    )


def verifier(directory: Path, family: Family, **changes: Any) -> Path:
    """What of a Qwen3 verifier a draft can need: config, embedding, head and final norm."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": LAYERS,
        "tie_word_embeddings": family.tied,
        **_llama(family),
    }
    draw = Drawing(family.seed + 1000, family.dtype)
    tensors = {
        "model.embed_tokens.weight": draw(family.vocab, family.hidden),
        "model.norm.weight": draw(family.hidden),
    }
    if not family.tied:
        tensors["lm_head.weight"] = draw(family.vocab, family.hidden)
    return write(directory, {**config, **changes}, tensors, "safetensors")


def dflash(directory: Path, family: Family, **changes: Any) -> Path:
    """A DFlash draft as z-lab writes it. Older and newer ways of writing take turns by seed."""
    block = {
        "mask_token_id": family.vocab - 1,
        "target_layer_ids": [1, 3, 5][: family.seed % 3 + 1],
    }
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "num_target_layers": LAYERS,
        "num_hidden_layers": family.layers,
        "tie_word_embeddings": family.tied,
        "max_window_layers": family.layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * family.layers,
        "attention_bias": bool(family.seed % 4 == 1),
        "dflash_config": block,
        "block_size": 4 + family.seed % 13,
        **_llama(family),
    }
    if family.seed % 2:
        block["block_size"] = config.pop("block_size")
    if family.seed % 5 == 3:
        config |= {"layer_types": ["sliding_attention"] * family.layers, "sliding_window": 64}
        config["use_sliding_window"] = True
    return write(directory, {**config, **changes}, _dflash_weights(family, config), family.form)


def _dflash_weights(family: Family, config: dict[str, Any]) -> Weights:
    draw, hidden = Drawing(family.seed, family.dtype), family.hidden
    states = len(config["dflash_config"]["target_layer_ids"])
    tensors = {
        "fc.weight": draw(hidden, states * hidden),
        "hidden_norm.weight": draw(hidden),
        "norm.weight": draw(hidden),
    }
    for i in range(family.layers):
        layer = {
            "input_layernorm.weight": draw(hidden),
            **decoder_layer(draw, family, biased=config["attention_bias"]),
            "self_attn.q_norm.weight": draw(family.head_dim),
            "self_attn.k_norm.weight": draw(family.head_dim),
        }
        tensors |= {f"layers.{i}.{name}": tensor for name, tensor in layer.items()}
    return tensors


KINDS = ("qwen3_next", "qwen3_next dense", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe stacked")


def with_mtp(directory: Path, family: Family, kind: str, **changes: Any) -> Path:
    """A verifier with an MTP head: of its other tensors, some that a draft can need."""
    config, draw = _mtp_config(family, kind), Drawing(family.seed, family.dtype)
    tensors: Weights = {f"mtp.{name}": t for name, t in _mtp_head(family, kind, draw)}
    middle = "language_model." if "text_config" in config else ""
    tensors[f"model.{middle}embed_tokens.weight"] = draw(family.vocab, family.hidden)
    tensors[f"model.{middle}norm.weight"] = draw(family.hidden)
    tensors["lm_head.weight"] = draw(family.vocab, family.hidden)
    for i in range(6):
        tensors[f"model.{middle}layers.{i}.mlp.up_proj.weight"] = draw(family.inner, family.hidden)
    return write(directory, {**config, **changes}, tensors, family.form)


EXPERTS, EXPERT, SHARED = 3, 24, 40


def _mtp_config(family: Family, kind: str) -> dict[str, Any]:
    moe = {
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": EXPERT,
        "shared_expert_intermediate_size": SHARED,
    }
    text: dict[str, Any] = {
        **_llama(family),
        "num_hidden_layers": 4,
        "partial_rotary_factor": 0.25,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 16,
        "tie_word_embeddings": False,
    }
    if kind.startswith("qwen3_next"):
        dense = {"mlp_only_layers": [3] if kind.endswith("dense") else []}
        step = {"decoder_sparse_step": 1, "norm_topk_prob": True}
        named = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
        return {**named, **text, **moe, **dense, **step}
    name = kind.split()[0]
    if name == "qwen3_5_moe":
        text |= moe
        del text["intermediate_size"]
    return {
        "architectures": [
            f"Qwen3_5{'Moe' if name.endswith('moe') else ''}ForConditionalGeneration"
        ],
        "model_type": name,
        "text_config": {**text, "model_type": f"{name}_text", "mtp_num_hidden_layers": 1},
    }


def _mtp_head(family: Family, kind: str, draw: Drawing) -> Iterator[tuple[str, Tensor]]:
    hidden = family.hidden
    yield "fc.weight", draw(hidden, 2 * hidden)
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        yield f"{name}.weight", draw(hidden)
    layer = decoder_layer(draw, family, gated=True)
    layer["input_layernorm.weight"] = draw(hidden)
    layer["self_attn.q_norm.weight"] = draw(family.head_dim)
    layer["self_attn.k_norm.weight"] = draw(family.head_dim)
    if "moe" in kind or kind == "qwen3_next":
        layer = {n: t for n, t in layer.items() if not n.startswith("mlp.")}
        layer |= {f"mlp.{name}": tensor for name, tensor in _experts(family, kind, draw)}
    yield from ((f"layers.0.{name}", tensor) for name, tensor in layer.items())


def _experts(family: Family, kind: str, draw: Drawing) -> Iterator[tuple[str, Tensor]]:
    hidden = family.hidden
    yield "gate.weight", draw(EXPERTS, hidden)
    yield "shared_expert_gate.weight", draw(1, hidden)
    for name in ("gate_proj", "up_proj"):
        yield f"shared_expert.{name}.weight", draw(SHARED, hidden)
    yield "shared_expert.down_proj.weight", draw(hidden, SHARED)
    if kind.endswith("stacked"):
        yield "experts.gate_up_proj", draw(EXPERTS, 2 * EXPERT, hidden)
        yield "experts.down_proj", draw(EXPERTS, hidden, EXPERT)
        return
    for i in range(EXPERTS):
        yield f"experts.{i}.gate_proj.weight", draw(EXPERT, hidden)
        yield f"experts.{i}.up_proj.weight", draw(EXPERT, hidden)
        yield f"experts.{i}.down_proj.weight", draw(hidden, EXPERT)


def eagle(
    directory: Path, family: Family, *, prefix: str = "", biased: bool = False, **changes: Any
) -> Path:
    """An EAGLE-1 head as its authors write it: the first layer has no input norm."""
    draw, hidden = Drawing(family.seed, family.dtype), family.hidden
    tensors = {
        "embed_tokens.weight": draw(family.vocab, hidden),
        "fc.weight": draw(hidden, 2 * hidden),
    }
    for i in range(family.layers):
        layer = decoder_layer(draw, family, biased=biased)
        layer.pop("self_attn.o_proj.bias", None)  # as Qwen2 has it
        if i:
            layer["input_layernorm.weight"] = draw(hidden)
        tensors |= {f"layers.{i}.{name}": tensor for name, tensor in layer.items()}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "bias": False,
        **_llama(family),
    }
    named = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    return write(directory, {**config, **changes}, named, family.form)


def _llama(family: Family) -> dict[str, Any]:
    rope = {"rope_theta": 1000000.0, "rope_scaling": None}
    if family.seed % 3 == 2:
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}
    return {
        **layer_config(family),
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-06,
        "vocab_size": family.vocab,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": family.dtype,
        **rope,
    }


def config_of(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config
