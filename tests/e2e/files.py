"""Files for the stage, without torch: a verifier's config, a speculator's, a draft of the research
layout, a prepared data set.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from speculators_core.data.prepared import (
    CODE_VERSION,
    META,
    TEXTS,
    TOKENS,
    PreparedMeta,
    SourceFacts,
)
from tests import tiny

SAMPLES, EVERY = 384, 16
"""Chats of the prepared set; every sixteenth is kept for validation."""


def verifier(directory: Path, *, hidden: int = 576, vocab: int = 49_152) -> Path:
    """The config of a Llama: all that pages read of a verifier."""
    directory.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": 30,
        "intermediate_size": 1_536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8_192,
        "rope_theta": 100_000.0,
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def speculator(directory: Path, of: str) -> Path:
    """The config of a draft in speculators format."""
    directory.mkdir(parents=True)
    config = tiny.draft_config(of, hidden=576, vocab=49_152, draft_vocab=8_192)
    (directory / "config.json").write_text(config.to_json())
    return directory


def research(directory: Path, *, wide: int = 576, vocab: int = 49_152, small: int = 512) -> Path:
    """A random draft as the EAGLE authors release theirs, its aux layers left out."""
    directory.mkdir(parents=True)
    random = np.random.default_rng(0)

    def weight(*shape: int) -> Any:
        return (0.02 * random.standard_normal(shape)).astype(np.float16)

    inner, heads, kv = 128, 9 * 64, 3 * 64
    layer = {
        "self_attn.q_proj": (heads, 2 * wide),
        "self_attn.k_proj": (kv, 2 * wide),
        "self_attn.v_proj": (kv, 2 * wide),
        "self_attn.o_proj": (wide, heads),
        "mlp.gate_proj": (inner, wide),
        "mlp.up_proj": (inner, wide),
        "mlp.down_proj": (wide, inner),
        "hidden_norm": (wide,),
        "input_layernorm": (wide,),
        "post_attention_layernorm": (wide,),
    }
    tensors = {f"midlayer.{name}.weight": weight(*shape) for name, shape in layer.items()}
    tensors |= {"fc.weight": weight(wide, 3 * wide), "norm.weight": weight(wide)}
    tensors["lm_head.weight"] = weight(small, wide)
    kept = np.zeros(vocab, dtype=bool)
    kept[:: vocab // small] = True
    tensors["t2d"] = kept
    tensors["d2t"] = np.flatnonzero(kept)[:small] - np.arange(small)
    save_file(tensors, directory / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": wide,
        "intermediate_size": inner,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2_048,
        "vocab_size": vocab,
        "draft_vocab_size": small,
        "torch_dtype": "float16",
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def prepared(directory: Path, question: list[str], answer: list[str], *, key: str) -> Path:
    """`SAMPLES` chats of the same words; an empty question or answer gives a mask of one kind."""
    directory.mkdir(parents=True)
    head, tail = (
        (["<|im_start|>", "assistant", "\n"], ["<|im_end|>", "\n"]) if question else ([], [])
    )
    words = [*question, *head, *answer, *(tail if answer else [])]
    ids = {word: number for number, word in enumerate(dict.fromkeys(words), 100)}
    mask = np.zeros(len(words), dtype=bool)
    start = len(question) + len(head)
    mask[start : start + len(answer) + len(tail[:1])] = True
    validation = np.arange(SAMPLES) % EVERY == EVERY - 1
    save_file(
        {
            "ids": np.tile(np.array([ids[word] for word in words], dtype=np.int32), SAMPLES),
            "mask": np.tile(mask, SAMPLES),
            "lengths": np.full(SAMPLES, len(words), dtype=np.int64),
            "validation": validation,
            "kept": np.zeros(8, dtype=bool),
            "offsets": np.zeros(0, dtype=np.int64),
            "source": np.zeros(SAMPLES, dtype=np.int32),
            "row": np.arange(1, SAMPLES + 1, dtype=np.int64),
        },
        directory / TOKENS,
    )
    texts = {str(number): word for word, number in ids.items()}
    (directory / TEXTS).write_text(json.dumps(texts))
    meta = PreparedMeta(
        code_version=CODE_VERSION,
        key=key,
        verifier="smollm2-135m-instruct",
        tokenizer_fingerprint=None,
        template_sha256="0" * 64,
        masked_by="generation blocks of the template",
        enable_thinking=None,
        vocab_size=49_152,
        draft_vocab_size=8_192,
        seq_length=512,
        samples=SAMPLES,
        validation_samples=int(validation.sum()),
        tokens=SAMPLES * len(words),
        masked_tokens=SAMPLES * int(mask.sum()),
        coverage=0.9973,
        lengths=[(64, 12), (128, 201), (256, 140), (512, 31)],
        skipped={"no answer": 9, "the template refuses it: roles must alternate": 4},
        doubts={"cut at 512 tokens": 31},
        sources=[
            SourceFacts(path="shop-chats.jsonl", weight=1.0, rows=300, samples=287),
            SourceFacts(path="openai/gsm8k", weight=0.25, rows=400, samples=97),
        ],
    )
    (directory / META).write_text(meta.model_dump_json())
    return directory
