"""Tiny EAGLE-3 drafts, one set of weights in the layout of every tool that writes them.

weights(shape, seed)    target names, float32, seeded: equal arguments give equal weights
research … speculators  write those weights as that tool would: names, config, file form
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.core.layouts.parts import Drawing, Weights, decoder_layer, layer_config

Maker = Callable[..., Path]
FORMS = ("safetensors", "bin", "sharded", "sharded bin")
LAYERS = 8  # of the verifier
AFTER = [2, 4, 5]  # the usual aux layers of such a verifier
OUTPUT = [1, 3, 4]  # the same states, counted as outputs


@dataclass(frozen=True)
class Shape:
    """Sizes of a draft; `wide` is the verifier's hidden size."""

    hidden: int = 32
    wide: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    inner: int = 48
    vocab: int = 128
    draft_vocab: int = 32
    layers: int = 1
    num_aux: int = 3
    fc_norm: bool = False
    norm_before_fc: bool = False
    dtype: str = "float32"
    rope_theta: float = 10000.0
    context: int = 512
    kind: str = "llama"


def verifier(directory: Path, shape: Shape, *, ends: bool = False, **changes: Any) -> Path:
    """A verifier that is known by its config alone: its weights are not at hand, or with `ends`
    only those before the first and after the last layer.
    """
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.wide,
        "intermediate_size": 2 * shape.wide,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": shape.rope_theta,
        "vocab_size": shape.vocab,
    } | changes
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    if ends:
        table = torch.ones(shape.vocab, shape.wide)
        tensors = {"model.embed_tokens.weight": table, "lm_head.weight": table.clone()}
        _save(tensors | {"model.norm.weight": table[0].clone()}, directory / "model.safetensors")
    return directory


def weights(shape: Shape, seed: int = 0, *, embedding: bool = False) -> Weights:
    """A random draft under its target names, in `shape.dtype`."""
    draw, hd = Drawing(seed, shape.dtype), shape.hidden
    found: Weights = {}
    for i in range(shape.layers):
        layer = {"input_layernorm.weight": draw(hd)}
        layer |= decoder_layer(draw, shape, wide=2 * hd if i == 0 else hd)
        layer |= {"hidden_norm.weight": draw(hd)} if i == 0 else {}
        if shape.kind == "qwen3":
            layer |= {f"self_attn.{name}_norm.weight": draw(shape.head_dim) for name in ("q", "k")}
        found |= {f"layers.{i}.{name}": tensor for name, tensor in layer.items()}
    found["fc.weight"] = draw(hd, shape.num_aux * shape.wide)
    found["norm.weight"] = draw(hd)
    found["lm_head.weight"] = draw(shape.draft_vocab, hd)
    table = draw(shape.vocab, hd)
    if embedding:
        found["embed_tokens.weight"] = table
    if shape.norm_before_fc:
        found["input_norm.weight"] = draw(shape.num_aux * shape.wide)
    if shape.fc_norm:
        found |= {f"fc_norm.{i}.weight": draw(shape.wide) for i in range(shape.num_aux)}
    if shape.draft_vocab < shape.vocab:
        shuffled = torch.randperm(shape.vocab, generator=draw.generator)
        ids = shuffled[: shape.draft_vocab].sort().values
        kept = torch.zeros(shape.vocab, dtype=torch.bool)
        kept[ids] = True
        found |= {"d2t": ids - torch.arange(len(ids)), "t2d": kept}
    return found


def by_frequency(draft: Weights, seed: int = 0) -> Weights:
    """The same draft, its vocabulary in another order: rows of `lm_head` and `d2t` together."""
    rows = len(draft["d2t"])
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    ids = (torch.arange(rows) + draft["d2t"])[order]
    moved = {"lm_head.weight": draft["lm_head.weight"][order], "d2t": ids - torch.arange(rows)}
    return {**draft, **moved}


def write(directory: Path, config: dict[str, Any], draft: Weights, form: str) -> Path:
    """config.json and the weights in one of `FORMS`; a None in the config leaves the field out."""
    directory.mkdir(parents=True)
    config = {name: value for name, value in config.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    draft = {name: tensor.contiguous() for name, tensor in draft.items()}
    suffix = "bin" if form.endswith("bin") else "safetensors"
    stem = "pytorch_model" if suffix == "bin" else "model"
    if not form.startswith("sharded"):
        _save(draft, directory / f"{stem}.{suffix}")
        return directory
    names = sorted(draft)
    parts = {f"{stem}-0000{n}-of-00002.{suffix}": names[n - 1 :: 2] for n in (1, 2)}
    for file, part in parts.items():
        _save({name: draft[name] for name in part}, directory / file)
    places = {name: file for file, part in parts.items() for name in part}
    index = directory / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    return directory


def _save(draft: Weights, file: Path) -> None:
    if file.suffix == ".bin":
        torch.save(draft, file)
    else:
        save_file(draft, file, metadata={"format": "pt"})


def _renamed(draft: Weights, prefix: str) -> Weights:
    """Layer 0 under `prefix` (which ends with a dot), all else as it is, but behind `model.` where
    the layer is.
    """
    if prefix.endswith("midlayer."):
        assert not any(name.startswith("layers.1.") for name in draft), "midlayer is the only one"
    outer = "model." if prefix.startswith("model.") else ""
    return {
        f"{prefix}{name.removeprefix('layers.0.')}" if name.startswith("layers.0.")
        else f"{outer}{name}" if name.startswith("layers.") else name: tensor
        for name, tensor in draft.items()
    }  # fmt: skip


def _llama(shape: Shape) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": shape.kind,
        **layer_config(shape),
        "num_hidden_layers": shape.layers,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": False,
        "torch_dtype": shape.dtype,
        "vocab_size": shape.vocab,
        "draft_vocab_size": shape.draft_vocab,
    }
    return config | ({"target_hidden_size": shape.wide} if shape.wide != shape.hidden else {})


def research(
    directory: Path,
    shape: Shape,
    draft: Weights,
    *,
    prefix: str = "midlayer.",
    form: str = "safetensors",
    **changes: Any,
) -> Path:
    """SafeAILab/EAGLE: a plain Llama config (FORMATS 4.2)."""
    return write(directory, _llama(shape) | changes, _renamed(draft, prefix), form)


def specforge(
    directory: Path,
    shape: Shape,
    draft: Weights,
    *,
    ids: list[int] | None = None,
    form: str = "safetensors",
    **changes: Any,
) -> Path:
    """`specforge export` (FORMATS 4.3); `ids` count outputs."""
    config = _llama(shape) | {"architectures": ["LlamaForCausalLMEagle3"]}
    if ids is not None:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids}
    if shape.fc_norm:
        config["fc_norm"] = True
    return write(directory, config | changes, _renamed(draft, "midlayer."), form)


def model_optimizer(
    directory: Path,
    shape: Shape,
    draft: Weights,
    *,
    ids: list[int] | None = None,
    switches: dict[str, Any] | None = None,
    form: str = "safetensors",
    **changes: Any,
) -> Path:
    """Model-Optimizer's `export_hf_checkpoint` (FORMATS 4.5): no `t2d`, no embedding, nulls."""
    block = {
        "eagle_aux_hidden_state_layer_ids": ids or [],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": None,
    } | (switches or {})
    config = _llama(shape) | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": block}
    draft = {name: t for name, t in draft.items() if name not in ("t2d", "embed_tokens.weight")}
    directory = write(directory, config | changes, draft, form)
    written = json.loads((directory / "config.json").read_text())
    nulls = {"use_cache": None, "bos_token_id": None, "attention_dropout": None}
    (directory / "config.json").write_text(json.dumps(written | nulls))
    return directory


def angelslim(
    directory: Path,
    shape: Shape,
    draft: Weights,
    *,
    ids: list[int] | None = None,
    form: str = "safetensors",
    **changes: Any,
) -> Path:
    """AngelSlim's `save_pretrained` (FORMATS 4.6); `ids` count outputs."""
    config = _llama(shape) | {
        "architectures": ["Eagle3LlamaForCausalLM"],
        "target_model_type": "llama",
        "aux_hidden_states_layer_ids": ids,
    }
    return write(directory, config | changes, _renamed(draft, "midlayer."), form)


def speculators(
    directory: Path,
    shape: Shape,
    draft: Weights,
    *,
    version: str = "0.9.0",
    ids: list[int] | None = None,
    name: str = "org/verifier",
    layer: dict[str, Any] | None = None,
    form: str = "safetensors",
    **changes: Any,
) -> Path:
    """The speculators format as its version `version` wrote it (FORMATS 4.1)."""
    inner = _llama(shape)
    theta = inner.pop("rope_theta")
    for field in ("architectures", "torch_dtype", "draft_vocab_size", "target_hidden_size"):
        inner.pop(field, None)
    new = version in ("0.5.0", "0.9.0")
    if new:
        inner["rope_parameters"] = {"rope_theta": theta, "rope_type": "default"}
    else:
        inner |= {"rope_theta": theta, "rope_scaling": None, "pretraining_tp": 1, "use_cache": True}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3}
    proposal |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
    config: dict[str, Any] = {
        "architectures": ["Eagle3DraftModel" if version == "0.9.0" else "Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": version,
        "draft_vocab_size": shape.draft_vocab,
        "norm_before_residual": False,
        "target_hidden_size": shape.wide if shape.wide != shape.hidden else None,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": name, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": inner | (layer or {}),
    }
    if version == "0.1.0.dev14":
        config |= {"has_no_defaults_at_init": False, "torch_dtype": shape.dtype}
        config |= {
            "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
            "transformers_version": "4.55",
        }
    else:
        config |= {"dtype" if new else "torch_dtype": shape.dtype}
        config |= {"eagle_aux_hidden_state_layer_ids": ids}
    if new:
        config |= {"norm_before_fc": shape.norm_before_fc, "embed_requires_grad": False}
        config |= {"tie_word_embeddings": False}
    if version == "0.9.0":
        config |= {"fc_norm": shape.fc_norm, "norm_output": False}
        config |= {"auto_map": {"": "config.Eagle3SpeculatorConfig"}}
    return write(directory, config | changes, draft, form)


def made_for_vllm(directory: Path, shape: Shape, draft: Weights, **changes: Any) -> Path:
    """Model-Optimizer's `convert_to_vllm_ckpt`: its export's weights under a dev14 config that
    always says `norm_before_residual: true` and names no aux layers (FORMATS 4.5).
    """
    bare = {name: t for name, t in draft.items() if name not in ("t2d", "embed_tokens.weight")}
    changes = {"norm_before_residual": True, "target_hidden_size": shape.wide} | changes
    changes.setdefault("layer", {"hidden_act": "silu", "mlp_bias": None, "attention_bias": None})
    return speculators(directory, shape, bare, version="0.1.0.dev14", **changes)
