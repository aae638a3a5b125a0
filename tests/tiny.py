"""Tiny random models on disk, for tests of every part.

    tiny_verifier     Llama, 8 layers, H=64, 4 heads (2 kv) of 32, V=256, byte tokenizer, ChatML
    tiny_speculator   a random EAGLE-3 draft for it, dv=64, speculators format
    tiny_research     the same draft as a research release: pickle, fp16, `midlayer.*`, no ids

Heads are 32 wide because vLLM's CPU attention knows no narrower ones. Weights are drawn wide
enough that greedy choices are rarely near-ties. All are float32 and seeded: equal arguments give
equal files. torch is imported only when a builder runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculators_core.config import Eagle3Config

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 8, 64, 4, 2, 32, 128
VOCAB, DRAFT_VOCAB = 256, 64
AUX_LAYERS = (2, 4, 5)
ROPE_THETA = 10000.0

# bytes 0xFD, 0xFE and 0xFF never occur in UTF-8: their places hold the special tokens
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_NEVER_IN_UTF8 = ("ý", "þ", "ÿ")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a UTF-8 byte, three special tokens at the end: 256 in all, nothing unknown."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(_NEVER_IN_UTF8))
    vocab = {symbol: i for i, symbol in enumerate([*alphabet, *SPECIAL])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[0],
        additional_special_tokens=[SPECIAL[1]],
        model_max_length=2048,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_verifier(
    directory: Path,
    *,
    layers: int = LAYERS,
    hidden: int = HIDDEN,
    vocab: int = VOCAB,
    rope_theta: float = ROPE_THETA,
    tied: bool = False,
    seed: int = 0,
) -> Path:
    """A random Llama with tokenizer and chat template, as `save_pretrained` writes it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": rope_theta, "rope_type": "default"},
        tie_word_embeddings=tied,
        initializer_range=0.2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float().eval()
    directory.mkdir(parents=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def draft_config(
    verifier: Path | str,
    *,
    aux_layers: tuple[int, ...] | None = AUX_LAYERS,
    draft_vocab: int = DRAFT_VOCAB,
    vocab: int = VOCAB,
    hidden: int = HIDDEN,
    layers: int = 1,
    kind: str = "llama",
    rope_theta: float = ROPE_THETA,
    **changes: Any,
) -> Eagle3Config:
    """The config of a tiny draft, its layers of type `kind`; `changes` are further fields of
    `Eagle3Config`."""
    values: dict[str, Any] = {
        "draft_vocab_size": draft_vocab,
        "norm_before_residual": True,
        "norm_output": True,
        "eagle_aux_hidden_state_layer_ids": list(aux_layers) if aux_layers else None,
        "dtype": "float32",
        "speculators_config": {
            "proposal_methods": [{"speculative_tokens": 3}],
            "verifier": {"name_or_path": str(verifier), "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {
            "model_type": kind,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "rms_norm_eps": 1e-5,
            "vocab_size": vocab,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"},
        },
    }
    return Eagle3Config.model_validate({**values, **changes})


def build_speculator(
    directory: Path, verifier: Path, *, seed: int = 1, config: Eagle3Config | None = None
) -> Path:
    """A random draft of `config` (default: `draft_config(verifier)`), by `save_speculator`.

    It carries the verifier's embedding where the widths agree; every norm weight differs from 1,
    so that a norm that is left out or applied twice shows.
    """
    import torch

    from speculators_core.checkpoint import save_speculator
    from speculators_core.models.eagle3 import Eagle3Draft

    config = config or draft_config(verifier)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        draft = Eagle3Draft(config).float().eval()
        with torch.no_grad():
            for name, tensor in draft.named_parameters():
                if "norm" in name:
                    tensor.copy_(1 + 0.3 * torch.randn_like(tensor))
                else:
                    tensor.copy_(0.2 * torch.randn_like(tensor))
            table = embedding_of(verifier)
            if table.shape == draft.embed_tokens.weight.shape:
                draft.embed_tokens.weight.copy_(table)
        if config.has_vocab_map:
            draft.set_vocab_map(_kept(config.vocab_size, config.draft_vocab_size))
    save_speculator(draft, directory)
    return directory


def embedding_of(verifier: Path) -> Tensor:
    """The verifier's embedding table [V, H], straight from its file."""
    from safetensors import safe_open

    with safe_open(verifier / "model.safetensors", framework="pt") as file:
        return file.get_tensor("model.embed_tokens.weight")


def build_research(
    directory: Path,
    verifier: Path,
    *,
    prefix: str = "midlayer.",
    seed: int = 1,
    safetensors: bool = False,
    embedding: bool = False,
    drop: tuple[str, ...] = (),
    config_changes: dict[str, Any] | None = None,
    hidden: int = HIDDEN,
    draft_vocab: int = DRAFT_VOCAB,
) -> Path:
    """A random draft as the EAGLE authors release theirs (FORMATS 4.2).

    `embedding` adds a table of its own, `drop` leaves tensors out; a None in `config_changes`
    removes that config field.
    """
    import torch
    from safetensors.torch import save_file

    from speculators_core.config import read_json

    wide = read_json(verifier / "config.json")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vocab_size": wide["vocab_size"],
        "draft_vocab_size": draft_vocab,
    }
    if hidden != wide["hidden_size"]:
        config["target_hidden_size"] = wide["hidden_size"]
    config.update(config_changes or {})
    config = {field: value for field, value in config.items() if value is not None}
    tensors = _research_tensors(
        prefix, wide["hidden_size"], hidden, wide["vocab_size"], draft_vocab, seed
    )
    if embedding:
        generator = torch.Generator().manual_seed(seed)
        table = torch.randn(wide["vocab_size"], hidden, generator=generator)
        tensors["embed_tokens.weight"] = (0.2 * table).half()
    tensors = {name: t for name, t in tensors.items() if name not in drop}
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    if safetensors:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(tensors, directory / "pytorch_model.bin")
    return directory


def _research_tensors(
    prefix: str, wide: int, hidden: int, vocab: int, draft_vocab: int, seed: int
) -> dict[str, Tensor]:
    import torch

    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> Tensor:
        return (0.2 * torch.randn(*shape, generator=generator)).half()

    def norm() -> Tensor:
        return (1 + 0.3 * torch.randn(hidden, generator=generator)).half()

    inner = 2 * hidden
    layer = {
        "self_attn.q_proj.weight": weight(HEADS * HEAD_DIM, 2 * hidden),
        "self_attn.k_proj.weight": weight(KV_HEADS * HEAD_DIM, 2 * hidden),
        "self_attn.v_proj.weight": weight(KV_HEADS * HEAD_DIM, 2 * hidden),
        "self_attn.o_proj.weight": weight(hidden, HEADS * HEAD_DIM),
        "mlp.gate_proj.weight": weight(inner, hidden),
        "mlp.up_proj.weight": weight(inner, hidden),
        "mlp.down_proj.weight": weight(hidden, inner),
        "hidden_norm.weight": norm(),
        "input_layernorm.weight": norm(),
        "post_attention_layernorm.weight": norm(),
    }
    tensors = {prefix + name: tensor for name, tensor in layer.items()}
    tensors |= {
        "fc.weight": weight(hidden, 3 * wide),
        "norm.weight": norm(),
        "lm_head.weight": weight(draft_vocab, hidden),
    }
    if draft_vocab < vocab:
        kept = _kept(vocab, draft_vocab)
        ids = kept.nonzero().flatten()
        tensors |= {"d2t": ids - torch.arange(draft_vocab), "t2d": kept}
    return tensors


def _kept(vocab: int, draft_vocab: int) -> Tensor:
    """Every n-th token, n = V // dv: spread out, so that offsets differ from ids."""
    import torch

    kept = torch.zeros(vocab, dtype=torch.bool)
    kept[:: vocab // draft_vocab][:draft_vocab] = True
    return kept
